"""A norm that no gradient can have convicts whoever signed it."""

import pytest

from phalanx.pipeline import GuardConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import Commit, GradientHeld, StepAudited
from phalanx.testing import Actor, rewrite_only, tiny_run

NONSENSE = [-1e30, *(pytest.param(norm, marks=pytest.mark.slow) for norm in (1e308, -5e-324, 1.7e308))]


def with_norm(kind, norm, step=2):
    def lie(outgoing, said):
        return [outgoing.with_fields({"norm_squared": norm}) if said.step == step else outgoing]

    return Actor(rewrite=rewrite_only(kind, lie))


@pytest.mark.parametrize("norm", NONSENSE)
def test_a_norm_that_nothing_can_have_convicts_who_signed_it(make_company, honest_digest, norm):
    run = tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0))
    company = make_company(run, {1: with_norm(Commit, norm)})

    company.run(4)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.step, verdict.stage) == ("worker-1", "forgery", 2, 1)
    facts = explain_evidence(company.run_dir / str(verdict.evidence))
    assert facts["rests on the owner's word"] == "nothing"
    assert "norm_squared" in facts["conclusion"]
    assert company.weights_digest() == honest_digest(run, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GradientHeld, pytest.param(StepAudited, marks=pytest.mark.slow)])
def test_so_does_such_a_norm_in_the_word_of_a_shadow(make_company, honest_digest, kind):
    run = tiny_run(guard=GuardConfig(step_audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, {2: with_norm(kind, -1e30)})

    company.run(4)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [("worker-2", "forgery")]
    assert company.weights_digest() == honest_digest(run, 4)
