"""The judgement of states and gradients by itself: two signed digests are equal, or one of two parties is named."""

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.pipeline.protocol.messages import GradientHeld, StepAudited
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.referee import Referee
from phalanx.pipeline.verify.state_judgement import StateJudgement

PLACE = {"epoch": EPOCH, "step": STEP, "stage": STAGE}


@pytest.fixture
def world(model_cache):
    found = make_world(model_cache)
    # one stage in other hands is enough
    found.facts.assignment = type(found.facts.assignment)(found.facts.assignment.holders, {STAGE: SHADOW})
    return found


@pytest.fixture
def judge(world):
    referee = Referee(world.plan, world.facts.bits_decide)
    return StateJudgement(world.facts, referee, GradientBounds(world.facts, referee))


def changed(state, **what):
    return state.model_copy(update=what or {"moments": "cc" * 32})


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def updated(world):
    """The step was applied; returns the state that it honestly leads to, and nothing is agreed on yet."""
    copy = world.build()
    copy.apply_update(STEP, world.gradients, 1.0)
    facts = world.facts
    facts.ledger.clip_coefficient = 1.0
    facts.previous, facts.ledger = facts.ledger, StepLedger(STEP + 1, EPOCH)
    return copy.compute_digest()


def test_equal_states_are_agreed_on_and_nothing_is_asked_for(world, judge, updated):
    judge.reported_states[STAGE] = {HOLDER: updated, SHADOW: updated}

    assert world.judge_page(judge.weigh_states()) is None
    assert world.facts.agreed_states == {STAGE: updated}
    assert world.asked == []


@pytest.mark.parametrize("who", [HOLDER, SHADOW])
def test_one_state_alone_agrees_on_nothing(world, judge, updated, who):
    judge.reported_states[STAGE] = {who: updated}

    assert world.judge_page(judge.weigh_states()) is None
    assert world.facts.agreed_states == {}


@pytest.mark.parametrize(("guilty", "accuser"), [(HOLDER, SHADOW), (SHADOW, HOLDER)])
@pytest.mark.parametrize("what", [{"moments": "cc" * 32}, {"weights": "dd" * 64}, {"step": STEP + 5}])
def test_the_update_is_redone_and_the_party_with_another_state_named(world, judge, updated, guilty, accuser, what):
    judge.reported_states[STAGE] = {HOLDER: updated, SHADOW: updated} | {guilty: changed(updated, **what)}

    judgement = world.judge_page(judge.weigh_states())

    verdict = judgement.verdict
    assert (verdict.party, verdict.offence, verdict.accuser) == (guilty, "state", accuser)
    assert judgement.work.steps == 1
    # the owner has made the update itself, and stands for the copy that is left
    assert world.facts.agreed_states == {STAGE: updated}


def test_where_both_copies_are_wrong_nothing_is_agreed_on(world, judge, updated):
    judge.reported_states[STAGE] = {HOLDER: changed(updated), SHADOW: changed(updated, weights="dd" * 64)}

    assert world.judge_page(judge.weigh_states()).verdict.offence == "state"
    assert world.facts.agreed_states == {}


def test_a_stage_that_repeats_the_state_before_the_step_is_named(world, judge, updated):
    judge.reported_states[STAGE] = {HOLDER: world.state, SHADOW: updated}

    assert world.judge_page(judge.weigh_states()).verdict.party == HOLDER


@pytest.mark.parametrize("guilty", [HOLDER, SHADOW])
def test_a_shadow_whose_undo_copy_is_not_of_the_signed_state_is_not_believed_and_hides_nobody(
    world, judge, updated, guilty
):
    judge.reported_states[STAGE] = {HOLDER: updated, SHADOW: updated} | {guilty: changed(updated)}
    tensors, num_steps = world.bulks[(SHADOW, "undo")]
    world.bulks[(SHADOW, "undo")] = ({name: tensor + 1 for name, tensor in tensors.items()}, num_steps)

    judgement = world.judge_page(judge.weigh_states())

    assert (judgement.verdict.party, judgement.verdict.offence) == (guilty, "state")


def test_where_nobody_brings_what_the_update_was_made_from_a_party_is_replaced_and_none_convicted(
    world, judge, updated
):
    judge.reported_states[STAGE] = {HOLDER: changed(updated), SHADOW: updated}
    for party in (HOLDER, SHADOW):
        del world.bulks[(party, "gradient")]

    judgement = world.judge_page(judge.weigh_states())

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "transfer")


def test_where_nothing_was_applied_yet_the_copy_of_the_shadow_is_not_the_one_it_was_given(world, judge):
    world.facts.ledger.agreed.clear()
    judge.reported_states[STAGE] = {HOLDER: world.state, SHADOW: changed(world.state)}

    judgement = world.judge_page(judge.weigh_states())

    assert (judgement.verdict.party, judgement.verdict.accuser) == (SHADOW, OWNER)
    assert world.asked == []


# --- gradients -------------------------------------------------------------------------------------------------------


def hold(world, **changes):
    ledger = world.facts.ledger
    true = {"gradient": transfer_digest(world.gradients), "norm_squared": finite_norm_squared(world.gradients, "float")}
    ledger.held[STAGE, SHADOW] = GradientHeld(**PLACE, **{"parts": (), **true} | changes)


def commit(world, **changes):
    ledger = world.facts.ledger
    ledger.commits[STAGE] = ledger.commits[STAGE].model_copy(update=changes)


def test_the_same_gradient_and_norm_are_agreed_on(world, judge):
    hold(world)

    assert world.judge_page(judge.weigh_gradients()) is None
    assert world.facts.ledger.gradients_agreed == {STAGE}
    assert world.asked == []


def test_a_norm_that_the_gradient_does_not_have_names_the_one_that_reported_it(world, judge):
    hold(world, norm_squared=7.0)
    assert world.judge_page(judge.weigh_gradients()).verdict.party == SHADOW

    hold(world)
    commit(world, norm_squared=7.0)
    assert world.judge_page(judge.weigh_gradients()).verdict.party == HOLDER


@pytest.mark.parametrize(("stage_off", "shadow_off"), [(0.97e-5, -0.05e-5), (-0.97e-5, 0.05e-5)])
def test_across_classes_a_norm_at_the_edge_of_rounding_does_not_convict_the_honest_shadow(
    model_cache, stage_off, shadow_off
):
    # an insider that says the largest norm that rounding allows, beside a shadow that rounds the other way
    world = make_world(model_cache, classes="mixed")
    true = finite_norm_squared(world.gradients, "float")
    commit(world, norm_squared=true * (1 + stage_off))
    hold(world, norm_squared=true * (1 + shadow_off))
    referee = Referee(world.plan, world.facts.bits_decide)
    judge = StateJudgement(world.facts, referee, GradientBounds(world.facts, referee))

    assert world.judge_page(judge.weigh_gradients()) is None
    assert world.facts.ledger.gradients_agreed == {STAGE}


def test_a_shadow_that_has_another_gradient_and_cannot_show_that_it_was_sent_it_is_named(world, judge):
    hold(world, gradient="bb" * 32)

    assert world.judge_page(judge.weigh_gradients()).verdict.party == SHADOW


def test_a_stage_that_sent_another_gradient_than_it_committed_to_is_named_by_its_own_parts(world, judge):
    commit(world, gradient="bb" * 32)
    hold(world, parts=(world.bulk_header(world.gradients),))

    assert world.judge_page(judge.weigh_gradients()).verdict.party == HOLDER


@pytest.mark.parametrize(
    "changes", [{"run": "run-0"}, {"receiver": OWNER}], ids=["another session", "another receiver"]
)
def test_parts_of_another_transfer_do_not_name_the_stage(world, judge, changes):
    commit(world, gradient="bb" * 32)
    hold(world, parts=(world.bulk_header(world.gradients, **changes),))

    assert world.judge_page(judge.weigh_gradients()).verdict.party == SHADOW


def test_before_the_state_is_agreed_on_no_gradient_is_weighed(world, judge):
    world.facts.ledger.agreed.clear()
    hold(world, gradient="bb" * 32)

    assert world.judge_page(judge.weigh_gradients()) is None
    assert world.facts.ledger.gradients_agreed == set()


# --- whole steps -----------------------------------------------------------------------------------------------------


def audit(world, **changes):
    ledger = world.facts.ledger
    ledger.awaited_step_audits.add((STAGE, SHADOW))
    true = {"gradient": transfer_digest(world.gradients), "norm_squared": finite_norm_squared(world.gradients, "float")}
    ledger.step_audits[(STAGE, SHADOW)] = StepAudited(**PLACE, order=1, **true | changes)


def test_a_recomputed_gradient_that_is_the_same_settles_the_audit(world, judge):
    audit(world)

    assert world.judge_page(judge.weigh_step_audits()) is None
    assert world.facts.ledger.steps_agreed == {(STAGE, SHADOW)}
    assert world.asked == []


@pytest.mark.parametrize("changes", [{"gradient": "bb" * 32}, {"norm_squared": 7.0}, {"norm_squared": None}])
def test_whoever_says_another_gradient_than_the_inputs_lead_to_is_named(world, judge, changes):
    audit(world, **changes)
    assert world.judge_page(judge.weigh_step_audits()).verdict.party == SHADOW

    audit(world)
    commit(world, **changes)
    assert world.judge_page(judge.weigh_step_audits()).verdict.party == HOLDER
