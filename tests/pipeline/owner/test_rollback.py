"""After a conviction the run goes back to before the first step in which the guilty party may have been wrong."""

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import UpdateReport
from phalanx.testing import Actor, rewrite_only, tampering, tiny_run

STEPS = 8
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}


def made_up_from(first):
    """A stage that doubles its weight gradient from a step on, consistently, so that only whole steps show it."""
    done = [0]

    def twist(gradients):
        done[0] += 1
        # counted by calls: one a step, until the conviction
        return {name: 2 * g for name, g in gradients.items()} if done[0] > first else gradients

    return Actor(tampering(twist=twist))


def audit_whole(company, *places):
    """Let the coin fall on these (stage, step) and no others."""
    company.draw.draws_whole_step = lambda *, step, epoch, stage: (stage, step) in places
    return company


def went_back(company):
    return [(body["to"], body["step"]) for body in company.event_bodies("rolled_back")]


@pytest.mark.parametrize(
    ("stages", "stage"),
    [(4, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((5, 2), (4, 2), (5, 1)))],
)
def test_the_run_goes_back_to_before_the_first_step_that_was_wrong(make_company, honest_digest, stages, stage):
    run = tiny_run(stages, guard=GuardConfig(keep_states=3, **NO_COIN))
    company = audit_whole(make_company(run, {stage: made_up_from(3)}), (stage, 6))

    results = company.run(STEPS)

    assert company.evicted == [f"worker-{stage}"]
    # of the steps before the first lie no other party has recomputed all
    assert went_back(company) == [(0, 6)]
    assert [result.guard.steps_redone for result in results] == [0, 0, 0, 0, 0, 0, 6, 0]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_without_kept_states_the_poison_stays(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = audit_whole(make_company(run, {1: made_up_from(3)}), (1, 6))

    company.run(STEPS)

    assert company.evicted == ["worker-1"]
    assert went_back(company) == []
    assert company.weights_digest() != honest_digest(run, STEPS)


@pytest.mark.slow
def test_lies_about_single_messages_that_slipped_through_are_undone_as_well(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(audit_rate=0.25, keep_states=STEPS, **NO_COIN))

    def tamper(direction, step, microbatch, tensor):
        return tensor * 1.01 if microbatch == 1 and direction == "backward" else tensor

    company = make_company(run, {2: Actor(tampering(tamper))})
    # at q = 1/4 a lie about one of four microbatches passes until its luck ends; here it ends in step 5
    company.draw.draw_microbatches = lambda **place: (1,) if place["step"] == 5 else (0,)

    company.run(STEPS)

    assert [(verdict.party, verdict.step) for verdict in company.verdicts] == [("worker-2", 5)]
    assert went_back(company) == [(0, 5)]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_two_liars_in_turn_leave_no_trace(make_company, honest_digest):
    pipeline = PipelineConfig(stages=5, spares=1, step_timeout_s=30.0)
    run = tiny_run(guard=GuardConfig(keep_states=8, **NO_COIN), pipeline=pipeline)
    company = audit_whole(make_company(run, {1: made_up_from(1), 3: made_up_from(2)}), (1, 4), (3, 5))

    company.run(STEPS)

    assert company.evicted == ["worker-1", "worker-3"]
    assert company.weights_digest() == honest_digest(run, STEPS)


def test_a_liar_of_one_step_costs_only_that_step(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    lies = Actor(tampering(lambda direction, step, microbatch, tensor: -tensor if step == 5 else tensor))
    company = make_company(run, {1: lies})

    results = company.run(STEPS)

    assert went_back(company) == []
    assert [result.guard.attempts for result in results] == [1, 1, 1, 1, 1, 2, 1, 1]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_a_wrong_state_is_convicted_where_states_are_kept_too(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(keep_states=6, **NO_COIN))

    def falsify(outgoing, applied):
        state = applied.states["1"].model_copy(update={"weights": "0" * 64})
        return [outgoing.with_fields({"states": {**applied.states, "1": state}})] if state.step == 3 else [outgoing]

    company = make_company(run, {1: Actor(rewrite=rewrite_only(UpdateReport, falsify))})

    company.run(6)

    assert [(verdict.offence, verdict.party) for verdict in company.verdicts] == [("state", "worker-1")]
    assert company.weights_digest() == honest_digest(run, 6)
