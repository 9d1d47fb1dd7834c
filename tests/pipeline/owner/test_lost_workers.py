"""A worker that dies or falls silent is replaced or named as missing; death is no crime."""

import re

import pytest

from phalanx.errors import NoHolderError, PeerLostError
from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.pipeline.protocol.messages import AuditReport, Commit, GradientHeld, UpdateReport
from phalanx.testing import Actor, WorkerCrash, crash_at, rewrite_only, tiny_run


@pytest.mark.quick_cases("1-0-0-forward")
@pytest.mark.parametrize(
    ("stage", "step", "microbatch", "direction"),
    [
        (1, 0, 0, "forward"),
        (2, 1, 3, "backward"),
        pytest.param(2, 1, 0, "forward", marks=pytest.mark.slow),
        pytest.param(1, 1, 2, "backward", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_at_any_moment_is_replaced_and_no_bit_is_lost(
    make_company, honest_digest, stage, step, microbatch, direction
):
    company = make_company(tiny_run(), {stage: Actor(crash_at(step, microbatch, direction))})

    results = company.run(3)

    assert company.lost == [f"worker-{stage}"]
    assert (company.verdicts, company.evicted) == ([], [])
    assert results[step].guard.attempts == 2
    assert f"worker-{stage}" not in company.engine.stage_holders.values()
    assert company.weights_digest() == honest_digest(tiny_run(), 3)


def test_the_only_worker_dies_and_the_owner_goes_on_alone(make_company, honest_digest):
    company = make_company(tiny_run(3), {1: Actor(crash_at(1))})

    company.run(3)

    assert company.lost == ["worker-1"]
    assert set(company.engine.stage_holders.values()) == {"owner"}
    assert company.weights_digest() == honest_digest(tiny_run(3), 3)


@pytest.mark.slow
def test_all_workers_die_one_after_the_other_and_the_owner_goes_on_alone(make_company, honest_digest):
    run = tiny_run(5)
    company = make_company(run, {1: Actor(crash_at(0, 1)), 2: Actor(crash_at(1)), 3: Actor(crash_at(2))})

    company.run(4)

    assert company.lost == ["worker-1", "worker-2", "worker-3"]
    assert company.weights_digest() == honest_digest(run, 4)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_shadow_that_was_promoted(make_company, honest_digest):
    pipeline = PipelineConfig(stages=4, spares=2, step_timeout_s=30.0)
    company = make_company(tiny_run(pipeline=pipeline), {1: Actor(crash_at(1))})
    successor = company.engine.stage_shadows[1]
    assert successor in ("worker-3", "worker-4")

    company.run(3)

    assert company.engine.stage_holders[1] == successor
    assert company.engine.stage_shadows[1] != "worker-1"
    assert company.weights_digest() == honest_digest(tiny_run(), 3)


@pytest.mark.slow
def test_a_spare_that_dies_is_replaced_as_shadow(make_company, honest_digest):
    pipeline = PipelineConfig(stages=3, spares=1, step_timeout_s=30.0)
    company = make_company(tiny_run(pipeline=pipeline))
    assert dict(company.engine.stage_shadows) == {1: "worker-2"}
    company.run(1)
    company.kill_worker("worker-2")

    company.run(2)

    assert company.lost == ["worker-2"]
    assert dict(company.engine.stage_shadows) == {1: "owner"}
    assert company.weights_digest() == honest_digest(tiny_run(3), 3)


@pytest.mark.slow
def test_a_worker_killed_between_two_steps_is_replaced(make_company, honest_digest):
    company = make_company()
    company.run(1)
    company.kill_worker("worker-1")

    company.run(2)

    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert company.weights_digest() == honest_digest(tiny_run(), 3)


def test_a_worker_killed_before_the_weights_are_collected_is_replaced(make_company, honest_digest):
    company = make_company()
    company.run(2)
    company.kill_worker("worker-2")

    assert company.weights_digest() == honest_digest(tiny_run(), 2)


@pytest.mark.slow
def test_a_crash_and_a_lie_in_the_same_step_are_told_apart(make_company, honest_digest):
    run = tiny_run(5)
    liar = make_actor(AttackConfig(kind="forward_sign_flip", from_step=1), "worker-3")
    company = make_company(run, {1: Actor(crash_at(1)), 3: liar})

    company.run(3)

    assert (company.lost, company.evicted) == (["worker-1"], ["worker-3"])
    assert [verdict.party for verdict in company.verdicts] == ["worker-3"]
    assert company.weights_digest() == honest_digest(run, 3)


def test_without_a_guard_nobody_has_a_copy_and_the_run_ends(make_company):
    company = make_company(tiny_run(guard=GuardConfig(mode="off")), {1: Actor(crash_at(1))})

    with pytest.raises(NoHolderError, match="stage 1: worker-1 is lost and had no shadow"):
        company.run(2)


def test_a_worker_that_dies_before_it_joins_is_named(make_company):
    def die(outgoing, hello):
        raise WorkerCrash

    with pytest.raises(PeerLostError, match="worker-1 ended before it joined"):
        make_company(tiny_run(), {1: Actor(rewrite=rewrite_only(Hello, die))})


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (Commit, r"commitments of stages \[1\]"),
        (AuditReport, r"audits \(stage, microbatch, auditor\) \[\(2, \d, 'worker-1'\)\]"),
        pytest.param(GradientHeld, r"gradients of stages \[2\]", marks=pytest.mark.slow),
        pytest.param(UpdateReport, r"states of stages \[1, 2\]", marks=pytest.mark.slow),
    ],
)
def test_a_step_whose_time_is_up_replaces_the_party_that_owes_most(make_company, honest_digest, kind, missing):
    run = tiny_run(
        guard=GuardConfig(audit_rate=0.25, step_audit_rate=0.0), pipeline=PipelineConfig(stages=4, step_timeout_s=2.0)
    )
    company = make_company(run, {1: Actor(rewrite=rewrite_only(kind, lambda outgoing, message: []))})

    company.run(2)

    assert (company.lost, company.verdicts) == (["worker-1"], [])
    (body,) = company.event_bodies("replaced")
    assert body["cause"] == "late"
    assert re.search(f"did not end within 2 s; still waiting for .*{missing}", str(body["reason"]))
    assert company.weights_digest() == honest_digest(run, 2)


def test_without_a_guard_a_step_that_cannot_end_says_what_is_missing(make_company):
    run = tiny_run(guard=GuardConfig(mode="off"), pipeline=PipelineConfig(stages=4, step_timeout_s=2.0))
    company = make_company(run, {1: Actor(rewrite=rewrite_only(Commit, lambda outgoing, message: []))})

    with pytest.raises(PeerLostError, match=r"did not end within 2 s; still waiting for commitments of stages \[1\]"):
        company.run(2)
