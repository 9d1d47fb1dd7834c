"""What a stage sends its shadow after an update, judged by itself: it must be what the stage signed the digest of."""

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.pipeline.protocol.messages import WeightsHeld
from phalanx.pipeline.stage.stage_copy import frozen_part, state_digest
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.referee import Referee
from phalanx.pipeline.verify.sent_state import SentState

NEXT = STEP + 1


class Handed:
    """A stage has made its update and sends its shadow what came of it."""

    def __init__(self, world, purpose):
        self.world, self.purpose = world, purpose
        copy = world.build()
        copy.apply(STEP, world.gradients, 1.0)
        self.whole = purpose == "snapshot"
        self.tensors = copy.optimizer.state() if self.whole else copy.trained()
        facts = world.facts
        facts.previous, facts.ledger = facts.ledger, StepLedger(NEXT, EPOCH)
        self.signed = copy.digest()
        referee = Referee(world.plan, facts.bits_decide)
        referee.epoch = EPOCH
        self.judge = SentState(facts, referee)
        self.send(self.tensors)

    def digest_of(self, tensors):
        return state_digest(tensors, frozen_part(self.signed), NEXT)

    def send(self, tensors, **changes):
        """The stage sends these tensors, which the shadow then has and shows."""
        self.shadow_has(tensors)
        self.show(self.world.bulk_header(tensors, purpose=self.purpose, step=NEXT, **changes))

    def shadow_has(self, tensors):
        weights = {name: tensor for name, tensor in tensors.items() if name.startswith("weight/")}
        self.world.bulks |= {(SHADOW, "weights"): (weights, NEXT), (SHADOW, "snapshot"): (tensors, NEXT)}
        self.taken = self.digest_of(tensors)

    def show(self, *parts):
        said = {"epoch": EPOCH, "step": NEXT, "stage": STAGE}
        self.judge.shown[STAGE] = WeightsHeld(**said, state=self.taken, parts=parts)

    def weighed(self):
        return self.world.judge(self.judge.weigh(STAGE, self.signed, self.taken))


@pytest.fixture(params=["update", "snapshot"])
def handed(request, model_cache):
    return Handed(make_world(model_cache, shadow=request.param), request.param)


def other(tensors, prefix="weight/"):
    return {name: tensor + 1 if name.startswith(prefix) else tensor for name, tensor in tensors.items()}


def test_what_was_sent_is_what_was_signed_and_nothing_is_asked(handed):
    assert handed.weighed() is None
    assert (handed.world.asked, handed.world.events) == ([], [])


def test_a_stage_that_sends_other_tensors_than_it_signs_is_named_by_its_own_parts(handed):
    handed.send(other(handed.tensors))

    judgement = handed.weighed()

    assert (judgement.verdict.party, judgement.verdict.offence, judgement.verdict.accuser) == (HOLDER, "state", SHADOW)
    assert judgement.headers == {"part-00000": handed.judge.shown[STAGE].parts[0]}
    assert judgement.compared.weights == handed.taken.weights
    assert judgement.compared.stage.keys() == handed.tensors.keys()
    assert [kind for kind, _ in handed.world.events] == ["alarm"]


def test_other_moments_alone_make_a_snapshot_another_one_and_an_update_none(handed):
    if handed.whole:
        handed.send(other(handed.tensors, "exp_avg/"))
        assert handed.weighed().verdict.party == HOLDER
    else:
        handed.taken = handed.taken.model_copy(update={"moments": "cc" * 32})
        assert handed.weighed() is None


def test_a_shadow_that_has_other_tensors_than_it_was_sent_is_named(handed):
    handed.shadow_has(other(handed.tensors))

    judgement = handed.weighed()

    assert (judgement.verdict.party, judgement.verdict.accuser) == (SHADOW, HOLDER)


def test_a_shadow_that_signs_a_digest_and_shows_other_tensors_is_to_be_replaced(handed):
    handed.send(other(handed.tensors))
    handed.taken = handed.taken.model_copy(update={"weights": frozen_part(handed.taken) + "ab" * 32})

    verdict = handed.weighed().verdict
    assert (verdict.party, verdict.offence) == (SHADOW, "transfer")


def test_a_shadow_that_brings_nothing_is_to_be_replaced(handed):
    handed.send(other(handed.tensors))
    handed.world.bulks.clear()

    verdict = handed.weighed().verdict
    assert (verdict.party, verdict.offence) == (SHADOW, "transfer")


@pytest.mark.parametrize("how", ["nothing", "no parts"])
def test_a_shadow_that_cannot_show_what_it_was_sent_is_named(handed, how):
    handed.send(other(handed.tensors))
    handed.show()
    if how == "nothing":
        handed.judge.shown.clear()

    assert handed.weighed().verdict.party == SHADOW


ELSEWHERE = {
    "another session": {"run": "run-0"},
    "another receiver": {"receiver": OWNER},
    "another sender": {"sender": SHADOW},
}


@pytest.mark.parametrize("changes", ELSEWHERE.values(), ids=ELSEWHERE)
def test_parts_that_were_signed_elsewhere_do_not_name_the_stage(handed, changes):
    handed.send(other(handed.tensors), **changes)

    assert handed.weighed().verdict.party == SHADOW


def test_parts_of_an_earlier_step_or_of_another_purpose_do_not_name_the_stage(handed):
    lie = other(handed.tensors)
    for place in ({"step": STEP, "purpose": handed.purpose}, {"step": NEXT, "purpose": "weights"}):
        handed.shadow_has(lie)
        handed.show(handed.world.bulk_header(lie, **place))
        assert handed.weighed().verdict.party == SHADOW


def test_a_part_that_comes_twice_is_no_whole_transfer(handed):
    handed.send(other(handed.tensors))
    (part,) = handed.judge.shown[STAGE].parts
    handed.show(part, part)

    assert handed.weighed().verdict.party == SHADOW


def test_a_signature_that_was_made_up_does_not_name_the_stage(handed):
    handed.send(other(handed.tensors))
    (part,) = handed.judge.shown[STAGE].parts
    handed.show(part.model_copy(update={"signature": "00" * 64}))

    assert handed.weighed().verdict.party == SHADOW


# --- frozen weights --------------------------------------------------------------------------------------------------


def with_frozen(state, digest):
    return state.model_copy(update={"weights": digest + state.weights[-64:]})


def test_a_stage_that_signs_other_frozen_weights_than_it_began_with_is_named_at_once(handed):
    handed.signed = with_frozen(handed.signed, "99" * 32)

    judgement = handed.weighed()

    assert (judgement.verdict.party, judgement.verdict.offence) == (HOLDER, "state")
    assert handed.world.asked == []


def test_before_any_state_is_agreed_on_frozen_weights_are_whatever_they_are(handed):
    handed.world.facts.previous = None
    handed.signed = with_frozen(handed.signed, "99" * 32)

    assert handed.judge.keeps_frozen(STAGE, handed.signed) is None


def test_a_shadow_that_says_that_it_has_other_frozen_weights_is_named(handed):
    # what is frozen was never sent, so no part of the stage's can be wrong about it
    handed.send(other(handed.tensors))
    handed.taken = with_frozen(handed.taken, "99" * 32)

    assert handed.weighed().verdict.party == SHADOW
