"""The comparison of weight gradients by itself: what rounding can do is allowed, and of the rest one is named."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.pipeline.protocol.messages import StepAudited
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.referee import Referee


@pytest.fixture
def world(model_cache):
    """Stage and auditor compute with other kernels than the owner."""
    found = make_world(model_cache, classes="mixed")
    found.facts.classes = {OWNER: "a", HOLDER: "b", SHADOW: "c"}
    return found


@pytest.fixture
def bounds(world):
    referee = Referee(world.plan, world.facts.bits_decide)
    referee.epoch = EPOCH
    return GradientBounds(world.facts, referee)


def scaled(gradients, factor):
    return {name: tensor * factor for name, tensor in gradients.items()}


def commit(world, gradients):
    """Let the stage have committed to this gradient, which both copies bring."""
    ledger = world.facts.ledger
    ledger.commits[STAGE] = ledger.commits[STAGE].model_copy(update={"gradient": transfer_digest(gradients)})
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "gradient")] = (gradients, STEP)


def audit(world, gradients):
    """Let the auditor have recomputed this gradient."""
    place = {"epoch": EPOCH, "step": STEP, "stage": STAGE}
    said = StepAudited(**place, order=1, norm_squared=1.0, gradient=transfer_digest(gradients))
    world.facts.ledger.step_audits[(STAGE, SHADOW)] = said
    world.bulks[(SHADOW, "audited")] = (gradients, STEP)


# --- what a stage committed to ---------------------------------------------------------------------------------------


def test_what_a_stage_committed_to_is_asked_of_the_other_copy_first(world, bounds):
    found = world.judge_page(bounds.fetch_claimed(world.facts.ledger, STAGE))

    assert transfer_digest(found) == transfer_digest(world.gradients)
    assert [(need.party, need.request.purpose) for need in world.asked] == [(SHADOW, "gradient")]


@pytest.mark.parametrize("brings", [None, "another"], ids=["nothing", "another gradient"])
def test_where_the_other_copy_does_not_bring_it_the_stage_is_asked(world, bounds, brings):
    world.bulks[(SHADOW, "gradient")] = (scaled(world.gradients, 2.0), STEP) if brings else None

    assert world.judge_page(bounds.fetch_claimed(world.facts.ledger, STAGE)) is not None
    assert [need.party for need in world.asked] == [SHADOW, HOLDER]


def test_a_gradient_with_another_digest_than_the_committed_one_is_none(world, bounds):
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "gradient")] = (scaled(world.gradients, 1 + 1e-6), STEP)

    assert world.judge_page(bounds.fetch_claimed(world.facts.ledger, STAGE)) is None


# --- two that differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "close"), [(1.0, True), (1 + 2e-6, True), (1.001, False), (float("nan"), False)])
def test_two_gradients_are_close_within_the_tolerance_alone(world, bounds, factor, close):
    audit(world, scaled(world.gradients, factor))

    assert world.judge_page(bounds.are_close(world.facts.ledger, STAGE, SHADOW)) is close


@pytest.mark.parametrize("missing", ["gradient", "audited"])
def test_what_is_not_brought_is_not_close(world, bounds, missing):
    audit(world, world.gradients)
    for party in (HOLDER, SHADOW):
        world.bulks[(party, missing)] = None

    assert world.judge_page(bounds.are_close(world.facts.ledger, STAGE, SHADOW)) is False


def test_an_auditor_that_has_said_nothing_is_not_close(world, bounds):
    assert world.judge_page(bounds.are_close(world.facts.ledger, STAGE, SHADOW)) is False


# --- which one is off ------------------------------------------------------------------------------------------------


def judged(world, bounds):
    """Return the party that is named, and whether it is for a wrong gradient or for one that it has withheld."""
    ruling = world.judge_page(bounds.judge_gradient(world.facts.ledger, STAGE, SHADOW))
    return ruling.party, ruling.offence


NOBODY = (None, "gradient")


def test_two_that_differ_by_rounding_are_both_acquitted(world, bounds):
    commit(world, scaled(world.gradients, 1 + 2e-6))
    audit(world, scaled(world.gradients, 1 - 2e-6))

    assert judged(world, bounds) == NOBODY


@pytest.mark.parametrize("factor", [2.0, 1.001, float("nan")])
def test_a_stage_whose_gradient_is_off_is_named(world, bounds, factor):
    commit(world, scaled(world.gradients, factor))
    audit(world, world.gradients)

    assert judged(world, bounds) == (HOLDER, "gradient")


@pytest.mark.parametrize("factor", [2.0, 1.001, float("nan")])
def test_an_auditor_whose_gradient_is_off_is_named(world, bounds, factor):
    audit(world, scaled(world.gradients, factor))

    assert judged(world, bounds) == (SHADOW, "gradient")


def test_one_parameter_that_is_off_is_not_hidden_by_the_others(world, bounds):
    name = min(world.gradients, key=lambda name: world.gradients[name].norm())
    commit(world, {**world.gradients, name: -world.gradients[name]})
    audit(world, world.gradients)

    assert judged(world, bounds) == (HOLDER, "gradient")


def test_a_stage_that_does_not_bring_what_it_committed_to_is_to_be_replaced(world, bounds):
    audit(world, world.gradients)
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "gradient")] = None

    assert judged(world, bounds) == (HOLDER, "transfer")


def test_an_auditor_that_does_not_bring_what_it_recomputed_is_to_be_replaced(world, bounds):
    audit(world, world.gradients)
    world.bulks[(SHADOW, "audited")] = None

    assert judged(world, bounds) == (SHADOW, "transfer")


@pytest.mark.parametrize("brings", [None, "others"], ids=["none", "others"])
def test_an_auditor_without_the_weights_that_it_signed_is_to_be_replaced_before_anything_is_computed(
    world, bounds, brings
):
    weights = {name: tensor + 1 for name, tensor in world.copy.weight_tensors().items()}
    world.bulks[(SHADOW, "weights")] = (weights, STEP) if brings else None
    commit(world, scaled(world.gradients, 2.0))
    audit(world, world.gradients)

    assert judged(world, bounds) == (SHADOW, "transfer")
    assert [need.request.purpose for need in world.asked] == ["weights"]


def test_a_stage_whose_inputs_nobody_brings_is_to_be_replaced(world, bounds):
    audit(world, world.gradients)
    for party in (OWNER, HOLDER):
        world.tensors[(party, 0, "forward", 3, False)] = None

    assert judged(world, bounds) == (HOLDER, "transfer")


@pytest.mark.parametrize(("class_of_stage", "guilty"), [("a", HOLDER), ("b", None)])
def test_rounding_is_a_lie_where_bits_decide(model_cache, class_of_stage, guilty):
    # with one class in the run, the stage of the owner's own class is held to its bits
    world = make_world(model_cache, classes="one")
    world.facts.classes = {OWNER: "a", HOLDER: class_of_stage, SHADOW: "c"}
    bounds = GradientBounds(world.facts, Referee(world.plan, world.facts.bits_decide))
    commit(world, scaled(world.gradients, 1 + 1e-6))
    audit(world, world.gradients)

    assert judged(world, bounds) == (guilty, "gradient")


def test_an_auditor_of_the_owners_class_is_held_to_its_bits(model_cache):
    world = make_world(model_cache, classes="one")
    world.facts.classes = {OWNER: "a", HOLDER: "b", SHADOW: "a"}
    bounds = GradientBounds(world.facts, Referee(world.plan, world.facts.bits_decide))
    audit(world, scaled(world.gradients, 1 + 1e-6))

    assert judged(world, bounds) == (SHADOW, "gradient")


# --- how far rounding goes -------------------------------------------------------------------------------------------


def allowed(world, bounds, claimed, truth):
    copy, ledger, referee = world.build(), world.facts.ledger, Referee(world.plan, world.facts.bits_decide)
    redone = world.judge_page(referee.redo_step(copy, ledger, STAGE, world.facts.assignment))
    redone.gradients = truth
    return bounds.is_allowed(copy, STEP, claimed, redone)


def test_beyond_the_tolerance_a_gradient_may_be_off_as_far_as_the_owners_own_rounding(world, bounds):
    # as if the owner's own recomputation had lost three digits in this very step
    rounded = scaled(world.gradients, 1.001)

    assert allowed(world, bounds, world.gradients, rounded)
    assert allowed(world, bounds, scaled(world.gradients, 1.007), rounded)
    assert not allowed(world, bounds, scaled(world.gradients, 1.02), rounded)


def test_where_honest_numbers_overflow_nothing_is_a_lie(world, bounds):
    overflowing = {**world.gradients, min(world.gradients): torch.full((), float("inf"))}

    assert allowed(world, bounds, scaled(world.gradients, 5.0), overflowing)
