"""Shadows in lock-step: the duplicated block of Lu et al. 2023, among parties that sign what they say."""

from phalanx.pipeline import GuardConfig
from phalanx.testing import Actor, tampering, tiny_run

LOCKSTEP = GuardConfig(shadow="lockstep", step_audit_rate=0.0, owner_audit_rate=0.0, screen=False)


def test_in_lockstep_everything_is_recomputed(make_company, honest_digest):
    run = tiny_run(guard=LOCKSTEP)
    company = make_company(run)

    (result,) = company.run(1)

    assert result.guard.num_audits == 2 * run.train.microbatches
    assert company.weights_digest() == honest_digest(run, 1)


def test_in_lockstep_a_lie_about_one_microbatch_is_found(make_company, honest_digest):
    run = tiny_run(guard=LOCKSTEP)
    lie = tampering(lambda direction, step, microbatch, tensor: tensor * 1.001 if microbatch == 2 else tensor)
    company = make_company(run, {1: Actor(lie)})

    company.run(2)

    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 2)
