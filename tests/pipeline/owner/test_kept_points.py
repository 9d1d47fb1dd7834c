"""With `keep_states` a conviction takes the run back to before the first step that no trusted party has recomputed."""

import pytest

from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import UpdateReport
from phalanx.testing import Actor, rewrite_only, tiny_run

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}
STEPS = 13


def audited_at(company, *places):
    """Let the coin fall on these (stage, step) and no others."""
    company.draw.draws_whole_step = lambda **place: (place["stage"], place["step"]) in places
    return company


def went_back(company):
    return [(body["to"], body["step"]) for body in company.event_bodies("rolled_back")]


def places_of_a_conviction():
    """(found in, last audited as a whole, lag): `test_rollback_points.py` asks of all where they go back to."""
    every = [(found, audited, lag) for found, audited in ((3, 0), (6, 3), (11, 6), (13, 12)) for lag in (0, 1)]
    quick = {(3, 0, 1)}
    return [pytest.param(*place, marks=() if place in quick else pytest.mark.slow) for place in every]


@pytest.mark.parametrize(("found", "audited", "lag"), places_of_a_conviction())
def test_a_conviction_takes_the_run_back_to_a_state_of_before_what_nobody_recomputed(
    make_company, honest_digest, lag, found, audited
):
    run = tiny_run(guard=GuardConfig(keep_states=4, commit_lag=lag, **NO_COIN))
    liar = make_actor(AttackConfig(kind="gradient_sign", from_step=audited + 1), "worker-1")
    company = audited_at(make_company(run, {1: liar}), (1, found), *((1, step) for step in range(audited + 1)))
    # where all was recomputed, no more is undone than what lags
    to = (audited + 1) // 4 * 4 if audited + 1 < found else found

    results = company.run(found + 3)

    assert company.evicted == ["worker-1"]
    # with a lag the step is known to be wrong when the next one is under way
    assert went_back(company) in ([(to, found)], [(to, found + lag)], [] if to == found else None)
    assert sum(result.guard.steps_redone for result in results) in (found - to, found + lag - to)
    assert company.checks.list_doubts() == []
    assert company.weights_digest() == honest_digest(run, found + 3)


@pytest.mark.slow
def test_two_liars_in_turn_leave_no_trace(make_company, honest_digest):
    pipeline = PipelineConfig(stages=5, spares=1, step_timeout_s=30.0)
    run = tiny_run(guard=GuardConfig(keep_states=5, **NO_COIN), pipeline=pipeline)
    liars = {n: make_actor(AttackConfig(kind="gradient_sign", from_step=n, stages=(n,)), f"worker-{n}") for n in (1, 3)}
    company = audited_at(make_company(run, liars), (1, 7), (3, 8))

    company.run(STEPS)

    assert company.evicted == ["worker-1", "worker-3"]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_a_loss_takes_back_the_step_whose_state_only_the_shadow_is_left_to_sign_and_no_other(
    make_company, honest_digest
):
    run = tiny_run(guard=GuardConfig(keep_states=4, **NO_COIN))
    # it dies before it signs what its sixth update gave, however quick it is
    unsigned = rewrite_only(UpdateReport, lambda outgoing, report: () if report.step == 6 else (outgoing,))
    company = make_company(run, {1: Actor(rewrite=unsigned)})

    company.run(6)
    company.kill_worker("worker-1")
    company.run(2)

    assert company.lost == ["worker-1"]
    assert went_back(company) == [(5, 6)]
    assert company.weights_digest() == honest_digest(run, 8)


def test_states_are_refused_where_nothing_is_undone():
    with pytest.raises(ValueError, match="keep_states"):
        GuardConfig(keep_states=4, mode="off")
