"""After a conviction the steps are named that hold the guilty party's work and were not recomputed in full."""

import pytest

from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.testing import Actor, tampering, tiny_run

STEPS = 8
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}
"""No whole step is redone but where a test says so: a shadow that doubts a gradient would ask for one, too."""


def made_up_from(first):
    """A stage that doubles its weight gradient from a step on, consistently, so that only whole steps show it."""
    done = [0]

    def twist(gradients):
        done[0] += 1
        return {name: 2 * g for name, g in gradients.items()} if done[0] > first else gradients

    return Actor(tampering(twist=twist))


def audit_whole(company, *places):
    """Let the coin fall on these (stage, step) and no others."""
    company.draw.draws_whole_step = lambda *, step, epoch, stage: (stage, step) in places
    return company


def audit_as_owner(company, *places):
    company.draw.draws_owner_audit = lambda *, step, epoch, stage: (stage, step) in places
    return company


def doubts(company):
    return {(doubt.party, doubt.stage): list(doubt.steps) for doubt in company.checks.list_doubts()}


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_that_a_convicted_stage_made_up_unseen_are_in_doubt(make_company, stage):
    company = audit_whole(make_company(tiny_run(guard=GuardConfig(**NO_COIN)), {stage: made_up_from(3)}), (stage, 6))

    company.run(STEPS)

    assert company.evicted == [f"worker-{stage}"]
    assert doubts(company) == {(f"worker-{stage}", stage): [(0, 5)]}
    # step 6, done again, was audited as a whole
    assert company.checks.unverified_counts() == {stage: 7, 3 - stage: 8}


@pytest.mark.slow
def test_a_step_that_was_audited_as_a_whole_is_not_in_doubt_and_the_one_before_it_is(make_company):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = audit_whole(make_company(run, {1: made_up_from(3)}), (1, 2), (1, 6))

    company.run(STEPS)

    assert doubts(company) == {("worker-1", 1): [(0, 1), (3, 5)]}
    assert company.checks.list_doubts()[0].last_verified == 2


@pytest.mark.slow
def test_a_step_that_the_owner_redid_is_not_in_doubt(make_company):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = audit_as_owner(audit_whole(make_company(run, {1: made_up_from(3)}), (1, 6)), (1, 1))

    company.run(STEPS)

    assert doubts(company) == {("worker-1", 1): [(0, 0), (2, 5)]}
    assert company.checks.checks_by_stage()[1]["owner"] == {"steps": 1, "last": 1}


@pytest.mark.slow
def test_a_rollback_that_reaches_far_enough_leaves_nothing_in_doubt(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(keep_states=6, **NO_COIN))
    company = audit_whole(make_company(run, {1: made_up_from(3)}), (1, 6))

    company.run(STEPS)

    assert doubts(company) == {}
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_what_an_auditor_vouched_for_that_was_convicted_as_well_is_in_doubt(make_company):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = make_company(run, {1: made_up_from(4), 2: made_up_from(5)})
    audit_whole(company, (1, 2), (1, 5), (2, 6))

    company.run(STEPS)

    assert sorted(company.evicted) == ["worker-1", "worker-2"]
    # in step 2 it was worker-2 who found the step right
    assert doubts(company)[("worker-1", 1)] == [(0, 4)]


def test_in_lockstep_every_step_is_recomputed_and_none_is_in_doubt(make_company):
    run = tiny_run(guard=GuardConfig(shadow="lockstep", **NO_COIN))
    company = make_company(run, {1: made_up_from(3)})

    company.run(STEPS)

    assert company.evicted == ["worker-1"]
    assert doubts(company) == {}
    assert company.checks.unverified_counts()[1] == 0


@pytest.mark.slow
def test_each_kind_of_check_is_counted_with_its_last_step(make_company):
    guard = GuardConfig(**NO_COIN)
    run = tiny_run(pipeline=PipelineConfig(stages=5, step_timeout_s=30.0), guard=guard)
    company = audit_as_owner(audit_whole(make_company(run), (1, 2), (1, 5)), (1, 3))

    company.run(STEPS)

    assert company.checks.checks_by_stage()[1] == {
        "steps": 8,
        "messages": {"steps": 8, "last": 7},
        "whole_step": {"steps": 2, "last": 5},
        "owner": {"steps": 1, "last": 3},
        "state": {"steps": 8, "last": 7},
    }
    assert company.checks.unverified_counts() == {1: 5, 2: 8, 3: 8}


def test_without_a_guard_every_step_in_other_hands_is_believed(make_company):
    company = make_company(tiny_run(guard=GuardConfig(mode="off")))

    company.run(3)

    assert company.checks.unverified_counts() == {1: 3, 2: 3}
    assert company.checks.checks_by_stage()[1]["messages"] == {"steps": 0, "last": None}


def test_a_state_that_was_bent_puts_the_step_before_in_doubt_though_it_was_audited(make_company):
    run, skipped = (
        tiny_run(guard=GuardConfig(**NO_COIN)),
        make_actor(AttackConfig(kind="skipped_update", from_step=3), "one"),
    )
    company = audit_whole(make_company(run, {1: skipped}), *((1, step) for step in range(STEPS)))

    company.run(STEPS)

    assert [(verdict.offence, verdict.step) for verdict in company.verdicts] == [("state", 3)]
    assert doubts(company) == {("worker-1", 1): [(2, 2)]}
