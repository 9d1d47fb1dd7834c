"""Shadows that are kept fresh in other ways than by the weight gradient: what each one finds, and what it cannot."""

import pytest

from phalanx.attacks import actor
from phalanx.models import LoraConfig
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import tiny_run


@pytest.mark.parametrize(("kind", "offence"), [("forward_sign_flip", "message"), ("wrong_learning_rate", "state")])
def test_a_liar_that_trains_adapters_is_named_and_its_shadow_takes_over(make_company, honest_digest, kind, offence):
    pytest.importorskip("peft")
    run = tiny_run(guard=GuardConfig(shadow="adapters", audit_rate=1.0), adapter=LoraConfig(rank=2))
    company = make_company(run, {1: actor(AttackConfig(kind=kind, from_step=1), "worker-1")})

    company.run(3)

    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-1", offence)]
    assert company.engine.holders[1] == "worker-2"
    assert company.weights_digest() == honest_digest(run, 3)


UPDATE = GuardConfig(shadow="update", step_audit_rate=0.0, owner_audit_rate=0.0)


@pytest.mark.parametrize("changes", [{}, {"audit_rate": 1.0}, {"step_audit_rate": 1.0}, {"owner_audit_rate": 1.0}])
def test_shadows_that_follow_weights_change_no_bit(make_company, honest_digest, changes):
    run = tiny_run(guard=UPDATE.model_copy(update=changes))
    company = make_company(run)

    company.run(4)

    assert company.weights_digest() == honest_digest(run, 4)
    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
