"""Two copies of a stage share its microbatches: one dies, or withholds something; no bit of the result shows it."""

import pytest

from phalanx.pipeline import OWNER, PipelineConfig
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Bulk,
    Commit,
    FetchReply,
    GradientHeld,
    StepAudited,
    UpdateReport,
)
from phalanx.testing import Actor, crash_at, only, tampering

both_copies = pytest.mark.parametrize("party", [1, 2])


def withholding(kind, when=lambda outgoing: True):
    return Actor(rewrite=only(kind, lambda outgoing, message: [] if when(outgoing) else [outgoing]))


@pytest.mark.parametrize(
    ("party", "step", "microbatch", "direction"),
    [(1, 0, 0, "forward"), (1, 1, 3, "backward"), (2, 1, 1, "forward"), (2, 2, 2, "backward")],
)
def test_a_copy_that_dies_at_any_moment_is_replaced_and_no_bit_is_lost(
    make_company, shared_run, honest_digest, party, step, microbatch, direction
):
    run = shared_run()
    company = make_company(run, {party: Actor(crash_at(step, microbatch, direction))})

    results = company.run(3)

    assert (company.lost, company.verdicts) == ([f"worker-{party}"], [])
    assert results[step].guard.attempts == 2
    assert set(company.engine.shadows.values()) == {OWNER}
    assert company.weights_digest() == honest_digest(run, 3)


def test_all_copies_die_one_after_the_other_and_the_owner_runs_both_lanes_alone(
    make_company, shared_run, honest_digest
):
    run = shared_run(5)
    company = make_company(run, {1: Actor(crash_at(0, 2)), 2: Actor(crash_at(1)), 3: Actor(crash_at(2))})

    company.run(4)

    assert company.lost == ["worker-1", "worker-2", "worker-3"]
    assert set(company.engine.holders.values()) == {OWNER}
    assert company.weights_digest() == honest_digest(run, 4)


def test_a_spare_becomes_the_second_copy(make_company, shared_run, honest_digest):
    run = shared_run()
    spare = run.model_copy(update={"pipeline": PipelineConfig(stages=4, spares=1, step_timeout_s=30.0)})
    company = make_company(spare, {3: Actor(crash_at(1, 1))})
    assert company.engine.shadows[1] == "worker-3"

    company.run(3)

    assert company.lost == ["worker-3"]
    assert company.engine.shadows[1] == "worker-2"
    assert [body["by"] for body in company.bodies("takeover")] == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
def test_a_copy_killed_between_two_steps_is_replaced(make_company, shared_run, honest_digest, party):
    run = shared_run()
    company = make_company(run)
    company.run(1)
    company.kill(f"worker-{party}")

    company.run(2)

    assert (company.lost, company.verdicts) == ([f"worker-{party}"], [])
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_crash_and_a_lie_are_told_apart(make_company, shared_run, honest_digest):
    run = shared_run(5, audit_rate=1.0)
    lies = Actor(tampering(lambda direction, step, microbatch, tensor: -tensor if step == 1 else tensor))
    company = make_company(run, {1: Actor(crash_at(1)), 3: lies})

    company.run(3)

    assert (company.lost, company.evicted) == (["worker-1"], ["worker-3"])
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_withheld_tensor_is_handed_on_and_nobody_is_replaced(
    make_company, shared_run, honest_digest, party, direction
):
    run = shared_run(patience_s=0.4)

    def is_the_one(outgoing):
        message = outgoing.message
        # what stages 1 and 2 send each other between two different workers
        return outgoing.receiver != OWNER and (message.step, message.direction) == (1, direction)

    company = make_company(run, {party: withholding(Activation, is_the_one)})

    company.run(3)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
def test_a_withheld_lane_is_handed_on(make_company, shared_run, honest_digest, party):
    run = shared_run(patience_s=0.4)
    to_the_other = withholding(Bulk, lambda outgoing: outgoing.receiver != OWNER and outgoing.message.step == 1)
    company = make_company(run, {party: to_the_other})

    company.run(3)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
def test_a_lane_and_a_tensor_that_are_withheld_together_get_nobody_honest_replaced(
    make_company, shared_run, honest_digest, party
):
    # an honest copy that waits for its own inputs has the other lane, and cannot say so yet
    run = shared_run(patience_s=0.4)

    def rewrite(outgoing):
        message = outgoing.message
        stuck = isinstance(message, Activation) and (message.step, message.source, message.direction) == (
            1,
            1,
            "forward",
        )
        return [] if stuck and outgoing.receiver != OWNER else [outgoing]

    company = make_company(run, {party: Actor(rewrite=rewrite)})

    company.run(3)

    assert company.lost == []
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
def test_answers_that_are_withheld_from_the_auditor_are_handed_on(make_company, shared_run, honest_digest, party):
    run = shared_run(5, audit_rate=1.0, patience_s=0.4)
    company = make_company(run, {party: withholding(FetchReply, lambda outgoing: outgoing.receiver != OWNER)})

    company.run(2)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(run, 2)


@both_copies
@pytest.mark.parametrize("kind", [Commit, UpdateReport, GradientHeld, AuditReport, StepAudited])
def test_a_copy_that_withholds_what_it_owes_is_replaced(make_company, shared_run, honest_digest, kind, party):
    run = shared_run(audit_rate=1.0, step_audit_rate=1.0, patience_s=0.4)
    company = make_company(run, {party: withholding(kind, lambda outgoing: outgoing.message.step == 1)})

    company.run(3)

    assert (company.lost, company.verdicts) == ([f"worker-{party}"], [])
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
def test_a_copy_that_falls_silent_altogether_is_replaced(make_company, shared_run, honest_digest, party):
    run, steps = shared_run(patience_s=0.4), []

    def fall_silent(outgoing):
        steps.append(getattr(outgoing.message, "step", 0))
        return [] if max(steps) >= 1 else [outgoing]

    company = make_company(run, {party: Actor(rewrite=fall_silent)})

    company.run(3)

    assert (company.lost, company.verdicts) == ([f"worker-{party}"], [])
    assert company.weights_digest() == honest_digest(run, 3)
