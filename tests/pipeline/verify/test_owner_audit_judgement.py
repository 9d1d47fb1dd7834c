"""The owner's own audit by itself: a stage's whole step is redone, and whatever it does not lead to names a party."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.errors import NoHolderError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import AuditReport, StepAudited
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.referee import Referee
from phalanx.pipeline.verify.state_judgement import OwnerAudits

PLACE = {"epoch": EPOCH, "step": STEP, "stage": STAGE}
BOTH = ("forward", "backward")


def audits_of(world):
    referee = Referee(world.plan, world.facts.bits_decide)
    referee.epoch = EPOCH
    return OwnerAudits(world.facts, referee, GradientBounds(world.facts, referee))


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


@pytest.fixture
def audits(world):
    return audits_of(world)


def named(judgements):
    return [(judgement.verdict.party, judgement.verdict.offence) for judgement in judgements]


def vouch(world, microbatch=0):
    """Let the shadow have reported the very digests that the stage committed to."""
    messages = world.facts.ledger.messages
    digests = {direction: messages[(STAGE, direction, microbatch)].digest for direction in BOTH}
    report = AuditReport(**PLACE, microbatch=microbatch, inputs=(), digests=digests, order=1)
    world.facts.ledger.reports[(STAGE, microbatch, SHADOW)] = report


def commit(world, **changes):
    commits = world.facts.ledger.commits
    commits[STAGE] = commits[STAGE].model_copy(update=changes)


# --- messages --------------------------------------------------------------------------------------------------------


def test_an_honest_step_names_nobody(world, audits):
    assert world.judge_page(audits.audit_stage(STAGE)) == []
    assert world.events == []
    # a state, two inputs for each of four microbatches, and nothing that the stage has sent
    assert len(world.asked) == 9
    assert STAGE not in {need.request.source for need in world.asked[1:]}


def test_in_one_class_a_message_that_is_off_by_rounding_names_the_stage(world, audits):
    world.lie(world.truth("forward") * (1 + 1e-6))

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "message")]


@pytest.mark.parametrize("microbatch", [0, 3])
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("wrong", [torch.neg, lambda tensor: tensor * 1.001, lambda tensor: tensor * float("nan")])
def test_a_message_that_the_step_does_not_lead_to_names_the_stage(world, audits, direction, microbatch, wrong):
    world.lie(wrong(world.truth(direction, microbatch)), direction, microbatch)

    (found,) = world.judge_page(audits.audit_stage(STAGE))

    verdict = found.verdict
    assert (verdict.party, verdict.offence, verdict.accuser) == (HOLDER, "message", OWNER)
    assert (verdict.direction, verdict.microbatch) == (direction, microbatch)
    assert found.headers["output"] == world.facts.ledger.messages[(STAGE, direction, microbatch)].header
    assert found.work.microbatches >= 1


@pytest.mark.parametrize("direction", BOTH)
def test_an_auditor_that_vouched_for_the_lie_is_named_after_the_stage(world, audits, direction):
    world.lie(-world.truth(direction), direction)
    vouch(world)

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "message"), (SHADOW, "collusion")]


def test_an_auditor_that_reported_another_digest_than_the_lie_is_no_accomplice(world, audits):
    vouch(world)
    world.lie(-world.truth("forward"))

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "message")]


def test_of_two_lies_the_one_that_was_vouched_for_is_judged(world, audits):
    # it tells of two parties, the other one of one
    world.lie(-world.truth("forward", 0), "forward", 0)
    world.lie(-world.truth("forward", 2), "forward", 2)
    vouch(world, 2)

    found = world.judge_page(audits.audit_stage(STAGE))

    assert [judgement.verdict.microbatch for judgement in found] == [2, 2]
    assert named(found) == [(HOLDER, "message"), (SHADOW, "collusion")]


# --- what nobody brings ----------------------------------------------------------------------------------------------


def altered(tensors):
    return {name: tensor + 1 for name, tensor in tensors.items()}


@pytest.mark.parametrize("brings", [None, altered], ids=["none", "another"])
def test_a_state_that_neither_copy_brings_as_it_was_agreed_on_is_the_stages_fault(world, audits, brings):
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "state")] = (brings(world.copy.state_tensors()), STEP) if brings else None

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "transfer")]
    assert [need.party for need in world.asked] == [SHADOW, HOLDER]


def test_the_state_of_an_earlier_step_is_not_the_agreed_one(world, audits):
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "state")] = (world.copy.state_tensors(), STEP + 1)

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "transfer")]


def test_one_copy_that_brings_the_agreed_state_is_enough(world, audits):
    world.bulks[(SHADOW, "state")] = (altered(world.copy.state_tensors()), STEP)

    assert world.judge_page(audits.audit_stage(STAGE)) == []


@pytest.mark.parametrize("brought", [None, memoryview(b""), torch.zeros(2, 8, 16)], ids=["none", "empty", "another"])
@pytest.mark.parametrize("key", [(0, "forward", 1), (2, "backward", 1)])
def test_an_input_that_nobody_brings_as_it_was_committed_to_is_the_stages_fault(world, audits, key, brought):
    for party in (OWNER, HOLDER, SHADOW):
        world.tensors[(party, *key, False)] = brought

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "transfer")]


# --- weight gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"gradient": "bb" * 32}, {"norm_squared": 7.0}, {"norm_squared": None}], ids=["gradient", "norm", "nan"]
)
def test_a_gradient_or_norm_that_the_step_does_not_lead_to_names_the_stage(world, audits, changes):
    commit(world, **changes)

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "gradient")]


def test_an_auditor_that_claims_to_have_computed_the_made_up_gradient_is_named_too(world, audits):
    commit(world, gradient="bb" * 32)
    said = StepAudited(
        **PLACE, order=1, gradient="bb" * 32, norm_squared=world.facts.ledger.commits[STAGE].norm_squared
    )
    world.facts.ledger.step_audits[(STAGE, SHADOW)] = said

    assert named(world.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "gradient"), (SHADOW, "collusion")]


# --- the state after the update --------------------------------------------------------------------------------------


def after_the_update(world, clip=0.5):
    """The next step begins, in which both copies agree on the state that the update honestly leads to; returns it."""
    copy = world.build()
    copy.apply_update(STEP, world.gradients, clip)
    facts = world.facts
    facts.ledger.clip_coefficient = clip
    facts.previous, facts.ledger = facts.ledger, StepLedger(STEP + 1, EPOCH, agreed={STAGE: copy.compute_digest()})
    return copy.compute_digest()


def test_the_state_that_the_redone_step_leads_to_names_nobody(world, audits):
    world.judge_page(audits.audit_stage(STAGE))
    after_the_update(world)

    assert audits.weigh_states() == []


@pytest.mark.parametrize("change", [{"moments": "cc" * 32}, {"weights": "dd" * 64}, {"step": STEP + 5}])
def test_another_state_names_both_that_agreed_on_it(world, audits, change):
    world.judge_page(audits.audit_stage(STAGE))
    honest = after_the_update(world)
    world.facts.agreed_states[STAGE] = honest.model_copy(update=change)
    world.facts.ledger.audits_drawn = True

    assert named(audits.weigh_states()) == [(HOLDER, "state"), (SHADOW, "state")]
    assert audits.weigh_states() == []


def test_the_state_before_the_step_repeated_names_both(world, audits):
    world.judge_page(audits.audit_stage(STAGE))
    after_the_update(world)
    world.facts.agreed_states[STAGE] = world.state

    assert named(audits.weigh_states()) == [(HOLDER, "state"), (SHADOW, "state")]


def test_an_update_with_another_clip_coefficient_names_both(world, audits):
    world.judge_page(audits.audit_stage(STAGE))
    after_the_update(world, clip=1.0)
    world.facts.previous.clip_coefficient = 0.5

    assert named(audits.weigh_states()) == [(HOLDER, "state"), (SHADOW, "state")]


def test_where_the_owner_shadows_only_the_holder_is_named(model_cache):
    world = make_world(model_cache)
    facts = world.facts
    facts.assignment = Assignment(facts.assignment.holders, {STAGE: OWNER})
    world.bulks[(OWNER, "state")] = world.bulks[(SHADOW, "state")]
    audits = audits_of(world)
    world.judge_page(audits.audit_stage(STAGE))
    honest = after_the_update(world)
    facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})

    assert named(audits.weigh_states()) == [(HOLDER, "state")]


def test_before_the_update_and_before_a_state_is_agreed_on_the_redone_step_waits(world, audits):
    world.judge_page(audits.audit_stage(STAGE))
    world.facts.ledger.audits_drawn = True
    assert audits.weigh_states() == []

    honest = after_the_update(world)
    del world.facts.agreed_states[STAGE]
    assert audits.weigh_states() == []

    world.facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})
    assert len(audits.weigh_states()) == 2


def stale(audits, facts):
    facts.previous, facts.ledger = facts.ledger, StepLedger(STEP + 2, EPOCH, agreed=facts.ledger.agreed)


def forgotten(audits, facts):
    audits.forget_redone()


@pytest.mark.parametrize("meanwhile", [stale, forgotten])
def test_what_was_redone_of_another_step_or_undone_names_nobody(world, audits, meanwhile):
    world.judge_page(audits.audit_stage(STAGE))
    honest = after_the_update(world)
    world.facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})
    meanwhile(audits, world.facts)

    assert audits.weigh_states() == []


HANDED_ON = {
    "the shadow changes": (
        Assignment({0: OWNER, 1: HOLDER, 2: SHADOW, 3: OWNER}, {1: OWNER, 2: HOLDER}),
        [HOLDER, SHADOW],
    ),
    "the holder is gone": (Assignment({0: OWNER, 1: SHADOW, 2: SHADOW, 3: OWNER}, {1: OWNER}), [SHADOW]),
    "the shadow is gone": (Assignment({0: OWNER, 1: HOLDER, 2: HOLDER, 3: OWNER}, {1: OWNER}), [HOLDER]),
    "a newcomer has it": (
        Assignment({0: OWNER, 1: "worker-9", 2: SHADOW, 3: OWNER}, {1: OWNER, 2: HOLDER}),
        [HOLDER, SHADOW],
    ),
}


@pytest.mark.parametrize(("hands", "guilty"), HANDED_ON.values(), ids=HANDED_ON)
def test_whoever_made_a_wrong_update_answers_for_it_after_the_stage_was_handed_on(world, audits, hands, guilty):
    world.judge_page(audits.audit_stage(STAGE))
    honest = after_the_update(world)
    world.facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})
    world.facts.assignment = hands

    assert named(audits.weigh_states()) == [(party, "state") for party in guilty]


def test_a_wrong_update_of_parties_that_are_all_gone_is_not_built_upon(world, audits):
    world.judge_page(audits.audit_stage(STAGE))
    honest = after_the_update(world)
    world.facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})
    world.facts.assignment = Assignment({0: OWNER, 1: "worker-9", 2: OWNER, 3: OWNER}, {1: OWNER})

    with pytest.raises(NoHolderError, match="resume from the last checkpoint"):
        audits.weigh_states()


def test_a_step_that_is_attempted_again_leaves_nothing_to_compare(world, audits):
    world.judge_page(audits.audit_stage(STAGE))
    world.facts.ledger = StepLedger(
        STEP, EPOCH + 1, agreed=world.facts.agreed_states, commits=world.facts.ledger.commits
    )
    assert audits.weigh_states() == []

    honest = after_the_update(world)
    world.facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})
    assert audits.weigh_states() == []


def test_a_wrong_step_leaves_no_state_to_compare(world, audits):
    commit(world, gradient="bb" * 32)
    world.judge_page(audits.audit_stage(STAGE))
    honest = after_the_update(world)
    world.facts.agreed_states[STAGE] = honest.model_copy(update={"moments": "cc" * 32})

    assert audits.weigh_states() == []


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(model_cache):
    world = make_world(model_cache, classes="mixed")
    world.facts.classes = {OWNER: "a", HOLDER: "b", SHADOW: "b"}
    return world


def test_across_classes_a_message_within_rounding_names_nobody(mixed):
    mixed.lie(mixed.truth("forward") * (1 + 1e-6))

    assert mixed.judge_page(audits_of(mixed).audit_stage(STAGE)) == []


@pytest.mark.parametrize("direction", BOTH)
def test_across_classes_a_message_that_its_receiver_alone_brings_is_compared(mixed, direction):
    mixed.lie(mixed.truth(direction) * (1 + 1e-6), direction)
    mixed.tensors[(HOLDER, STAGE, direction, 0, False)] = None

    assert mixed.judge_page(audits_of(mixed).audit_stage(STAGE)) == []


def test_across_classes_a_message_beyond_rounding_names_the_stage(mixed):
    mixed.lie(mixed.truth("forward") * 1.01)

    assert named(mixed.judge_page(audits_of(mixed).audit_stage(STAGE))) == [(HOLDER, "message")]


def test_across_classes_a_stage_whose_message_nobody_brings_is_to_be_replaced(mixed):
    mixed.lie(mixed.truth("forward") * (1 + 1e-6))
    for party in (HOLDER, SHADOW):
        mixed.tensors[(party, STAGE, "forward", 0, False)] = None

    assert named(mixed.judge_page(audits_of(mixed).audit_stage(STAGE))) == [(HOLDER, "transfer")]


def claim(world, factor, norm_factor=1.0):
    """Let the stage have committed to its gradient times a factor, and to a norm that is so far off that one's."""
    gradients = {name: tensor * factor for name, tensor in world.gradients.items()}
    norm = finite_norm_squared(gradients, "float")
    commit(world, gradient=transfer_digest(gradients), norm_squared=norm and norm_factor * norm)
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "gradient")] = (gradients, STEP)
    return gradients


def test_across_classes_the_update_is_made_with_the_stages_own_gradient(mixed):
    gradients = claim(mixed, 1 + 2e-6)
    audits = audits_of(mixed)
    assert mixed.judge_page(audits.audit_stage(STAGE)) == []

    mixed.gradients = gradients
    after_the_update(mixed)

    assert audits.weigh_states() == []


@pytest.mark.parametrize(("factor", "norm_factor"), [(1.01, 1.0), (1.0, 1.01), (float("nan"), 1.0)])
def test_across_classes_a_gradient_or_norm_beyond_rounding_names_the_stage(mixed, factor, norm_factor):
    claim(mixed, factor, norm_factor)

    assert named(mixed.judge_page(audits_of(mixed).audit_stage(STAGE))) == [(HOLDER, "gradient")]


def test_across_classes_a_stage_whose_gradient_nobody_brings_is_to_be_replaced_and_leaves_no_state(mixed):
    audits = audits_of(mixed)
    for party in (HOLDER, SHADOW):
        mixed.bulks[(party, "gradient")] = None
    assert named(mixed.judge_page(audits.audit_stage(STAGE))) == [(HOLDER, "transfer")]

    mixed.facts.agreed_states[STAGE] = after_the_update(mixed).model_copy(update={"moments": "cc" * 32})
    assert audits.weigh_states() == []
