"""The referee by itself: what both sides signed decides, and of what is brought only what has the digest."""

from dataclasses import replace

import pytest
import torch
from hand_made import ASSIGNMENT, EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.pipeline.evidence.files import MICROBATCH_INPUTS, TRUTH_PREFIX
from phalanx.pipeline.evidence.weighing import GradientClaim
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.verify.referee import Dispute, Referee


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


@pytest.fixture
def referee(world):
    made = Referee(world.plan, world.facts.bits_decide)
    made.epoch = EPOCH
    return made


def dispute(world, report, direction="forward", microbatch=0, **changes):
    messages = world.facts.ledger.messages
    inputs = {"forward": messages[(0, "forward", microbatch)], "backward": messages[(2, "backward", microbatch)]}
    facts = {
        "direction": direction,
        "accuser": SHADOW,
        "assignment": ASSIGNMENT,
        "inputs": inputs,
        "output": messages[(STAGE, direction, microbatch)],
        "report": report,
        "state": world.state,
    }
    return Dispute(**facts | changes)


def changed(tensors):
    return {name: tensor + 1 for name, tensor in tensors.items()}


# --- a message -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("wrong", [torch.neg, lambda tensor: tensor * float("nan"), lambda tensor: tensor * 1.001])
def test_a_stage_that_sent_another_tensor_is_guilty(world, referee, direction, wrong):
    world.lie(wrong(world.truth(direction)), direction)

    verdict, compared = world.judge_page(referee.judge_message(dispute(world, world.report(), direction)))

    assert (verdict.party, verdict.offence, verdict.accuser) == (HOLDER, "message", SHADOW)
    assert torch.equal(compared.tensors["recomputed"], world.honest(direction))
    assert compared.weights == world.state.weights
    assert referee.take_work().microbatches == 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_accuser_whose_own_result_is_wrong_is_guilty(world, referee, direction):
    report = world.report(**{direction: -world.truth(direction)})

    verdict, _ = world.judge_page(referee.judge_message(dispute(world, report, direction)))

    assert (verdict.party, verdict.offence) == (SHADOW, "accusation")


def test_where_both_are_right_nobody_is(world, referee):
    verdict, compared = world.judge_page(referee.judge_message(dispute(world, world.report())))

    assert verdict is None
    assert compared.tensors


def brought_nothing(world):
    del world.bulks[(SHADOW, "weights")]


def brought_other_weights(world):
    world.bulks[(SHADOW, "weights")] = (changed(world.copy.weight_tensors()), STEP)


def brought_the_weights_of_another_step(world):
    later = world.build()
    later.apply_update(STEP, world.gradients, 1.0)
    world.bulks[(SHADOW, "weights")] = (later.weight_tensors(), STEP + 1)


@pytest.mark.parametrize("brings", [brought_nothing, brought_other_weights, brought_the_weights_of_another_step])
def test_an_accuser_without_the_weights_that_it_signed_is_guilty_and_nothing_is_computed(world, referee, brings):
    world.lie(-world.truth("forward"))
    brings(world)

    verdict, compared = world.judge_page(referee.judge_message(dispute(world, world.report())))

    assert (verdict.party, verdict.offence, compared.tensors) == (SHADOW, "transfer", {})
    assert referee.take_work().microbatches == 0


OTHER_BYTES = (None, memoryview(b""), memoryview(b"short"), torch.zeros(2, 8, 16))


@pytest.mark.parametrize("brought", OTHER_BYTES, ids=["nothing", "empty", "short", "another tensor"])
def test_an_input_without_its_digest_is_no_input(world, referee, brought):
    report = world.report()
    for party in (OWNER, HOLDER):
        world.tensors[(party, 0, "forward", 0, False)] = brought

    verdict, compared = world.judge_page(referee.judge_message(dispute(world, report)))

    # the stage has shown the header of what it used, and so answers for the bytes
    assert (verdict.party, verdict.offence, compared.tensors) == (HOLDER, "transfer", {})


def test_of_two_that_can_bring_an_input_one_is_enough(world, referee):
    world.lie(-world.truth("forward"))
    world.tensors[(OWNER, 0, "forward", 0, False)] = torch.zeros(2, 8, 16)

    verdict, _ = world.judge_page(referee.judge_message(dispute(world, world.report())))

    assert (verdict.party, verdict.offence) == (HOLDER, "message")


def test_for_an_input_that_the_stage_never_showed_its_sender_answers(world, referee):
    found = dispute(world, world.report(), "backward")
    shown_by_the_accuser = {name: replace(given, shown_by=SHADOW) for name, given in found.inputs.items()}
    for party in (SHADOW, HOLDER):
        world.tensors[(party, 2, "backward", 0, False)] = None

    verdict, compared = world.judge_page(
        referee.judge_message(dispute(world, found.report, "backward", inputs=shown_by_the_accuser))
    )

    # it holds stage 2, and has signed what came from there
    assert (verdict.party, verdict.offence, compared.tensors) == (SHADOW, "transfer", {})


def test_a_referee_that_has_the_stage_asks_nobody_for_it(world, referee):
    world.lie(-world.truth("forward"))

    verdict, _ = world.judge_page(referee.judge_message(dispute(world, world.report(), accuser=OWNER), world.build()))

    assert verdict.party == HOLDER
    assert {need.request.kind for need in world.asked} == {"fetch"}
    # the owner's own claim is its report
    assert not any(need.request.claim for need in world.asked)


# --- gradients, norms, updates ----------------------------------------------------------------------------------------


def commit(world, **changes):
    ledger = world.facts.ledger
    ledger.commits[STAGE] = ledger.commits[STAGE].model_copy(update=changes)


def claim(world, **changes):
    """What the shadow claims about the weight gradient: the truth, but for what a test changes."""
    true = {"digest": transfer_digest(world.gradients), "norm_squared": finite_norm_squared(world.gradients, "float")}
    return GradientClaim(SHADOW, **true | changes)


def judge_step(world, referee, **other):
    return world.judge_page(referee.judge_step(world.facts.ledger, STAGE, ASSIGNMENT, SHADOW, claim(world, **other)))


@pytest.mark.parametrize(
    ("committed", "claimed", "guilty"),
    [
        ({}, {}, None),
        ({}, {"digest": "bb" * 32}, SHADOW),
        ({}, {"norm_squared": 7.0}, SHADOW),
        ({"gradient": "bb" * 32}, {}, HOLDER),
        ({"norm_squared": 7.0}, {}, HOLDER),
        ({"norm_squared": None}, {}, HOLDER),
        ({"gradient": "bb" * 32}, {"digest": "bb" * 32}, HOLDER),
    ],
    ids=["both honest", "its digest", "its norm", "gradient", "norm", "no norm", "both lie"],
)
def test_a_whole_step_is_redone_and_who_is_off_is_named(world, referee, committed, claimed, guilty):
    commit(world, **committed)

    ruling = judge_step(world, referee, **claimed)

    assert (ruling.party, ruling.offence) == (guilty, "gradient")
    assert referee.take_work().steps == 1


def test_a_step_that_was_redone_is_shown_with_weights_inputs_and_gradient(world, referee):
    compared = judge_step(world, referee).compared

    assert compared.weights == world.state.weights
    assert {f"{name}-{m:05d}" for name in MICROBATCH_INPUTS for m in range(4)} <= compared.tensors.keys()
    shown = {name: tensor for name, tensor in compared.tensors.items() if name.startswith(TRUTH_PREFIX)}
    assert {name.removeprefix(TRUTH_PREFIX) for name in shown} == world.gradients.keys()


def test_a_step_is_not_redone_without_weights_or_inputs_and_no_lie_is_seen_in_that(world, referee):
    for party in (SHADOW, HOLDER):
        world.tensors[(party, 2, "backward", 3, False)] = None
    ruling = judge_step(world, referee)
    assert (ruling.party, ruling.offence) == (HOLDER, "transfer")

    brought_other_weights(world)
    ruling = judge_step(world, referee)
    assert (ruling.party, ruling.offence) == (SHADOW, "transfer")


def judge_norm(world, referee):
    ruling = world.judge_page(referee.judge_norm(world.facts.ledger, STAGE, HOLDER, SHADOW))
    return ruling.party, ruling.offence


def test_of_two_norms_of_one_gradient_the_wrong_one_is_named(world, referee):
    assert judge_norm(world, referee) == (SHADOW, "gradient")

    commit(world, norm_squared=2 * finite_norm_squared(world.gradients, "float"))
    assert judge_norm(world, referee) == (HOLDER, "gradient")

    # the shadow says that it has the very gradient, and then brings another one
    world.bulks[(SHADOW, "gradient")] = (changed(world.gradients), STEP)
    assert judge_norm(world, referee) == (SHADOW, "transfer")


@pytest.fixture
def updated(world):
    copy = world.build()
    copy.apply_update(STEP, world.gradients, 0.5)
    return copy.compute_digest()


def judge_update(world, referee, after, parties=(SHADOW, HOLDER)):
    gradient = (transfer_digest(world.gradients), 0.5)
    return world.judge_page(referee.judge_update(STAGE, parties, world.state, gradient, after))


@pytest.mark.parametrize("guilty", [HOLDER, SHADOW, None])
def test_an_update_is_redone_and_the_other_state_named(world, referee, updated, guilty):
    wrong = updated.model_copy(update={"moments": "cc" * 32})
    after = {party: wrong if party == guilty else updated for party in (HOLDER, SHADOW)}

    ruling = judge_update(world, referee, after)

    assert (ruling.party, ruling.offence) == (guilty, "state")
    assert ruling.compared.weights == world.state.weights


def test_the_states_that_are_compared_are_those_that_were_signed_and_not_who_brings_the_bytes(world, referee, updated):
    wrong = updated.model_copy(update={"weights": "cc" * 32})

    # a party that is gone has signed it, and its neighbour brings what it was computed from
    assert judge_update(world, referee, {"worker-9": wrong}).party == "worker-9"
    assert judge_update(world, referee, {"worker-9": updated}).party is None


@pytest.mark.parametrize("purpose", ["undo", "gradient"])
@pytest.mark.parametrize("brought", ["nothing", "other bytes"])
def test_of_two_that_can_bring_an_update_one_is_enough_and_none_is_no_lie(world, referee, updated, purpose, brought):
    wrong = updated.model_copy(update={"moments": "cc" * 32})
    after = {HOLDER: wrong, SHADOW: updated}

    def spoil(party):
        tensors, num_steps = world.bulks.pop((party, purpose))
        if brought == "other bytes":
            world.bulks[(party, purpose)] = (changed(tensors), num_steps)

    spoil(SHADOW)
    ruling = judge_update(world, referee, after)
    assert (ruling.party, ruling.offence) == (HOLDER, "state")

    spoil(HOLDER)
    ruling = judge_update(world, referee, after)
    assert (ruling.party, ruling.offence, ruling.compared.tensors) == (SHADOW, "transfer", {})


def test_undo_copy_and_gradient_may_come_from_two_parties(world, referee, updated):
    # each of the two spoils what it alone would be believed with
    del world.bulks[(SHADOW, "undo")], world.bulks[(HOLDER, "gradient")]
    wrong = updated.model_copy(update={"weights": "cc" * 32})

    assert judge_update(world, referee, {HOLDER: updated, SHADOW: wrong}).party == SHADOW


def test_a_stage_is_taken_from_the_first_that_brings_what_was_agreed_on(world, referee):
    world.bulks[(HOLDER, "state")] = (changed(world.copy.state_tensors()), STEP)

    found = world.judge_page(referee.stage_at(STAGE, (HOLDER, SHADOW), world.state))

    assert found.compute_digest() == world.state
    assert [need.party for need in world.asked] == [HOLDER, SHADOW]
    assert world.judge_page(referee.stage_at(STAGE, (HOLDER,), world.state)) is None
