"""Whole steps are recomputed now and then, weight gradient included."""

import pytest

from phalanx.models import LoraConfig
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import StepAudited
from phalanx.testing import Actor, rewrite_only, tampering, tiny_run

ALWAYS = GuardConfig(step_audit_rate=1.0, owner_audit_rate=0.0)
DOUBLED = Actor(tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()}))


@pytest.mark.quick_cases("3-gpipe")
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [(3, "gpipe"), (5, "1f1b"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((5, "gpipe"), (3, "1f1b")))],
)
def test_an_honest_weight_gradient_is_found_right(make_company, honest_digest, schedule, stages):
    pipeline = PipelineConfig(stages=stages, schedule=schedule, step_timeout_s=30.0)
    run = tiny_run(guard=ALWAYS, pipeline=pipeline)
    company = make_company(run)

    results = company.run(3)

    assert company.verdicts == []
    assert company.event_bodies("alarm") == []
    # every microbatch of every stage in other hands, each step
    assert [result.guard.num_audits for result in results] == [(stages - 2) * run.train.microbatches] * 3
    assert company.weights_digest() == honest_digest(run, 3)


def test_adapters_are_audited_too(make_company, honest_digest):
    run = tiny_run(guard=ALWAYS, adapter=LoraConfig(rank=2))
    company = make_company(run)

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_made_up_weight_gradient_is_found_in_the_step_that_is_audited(make_company, honest_digest):
    run = tiny_run(guard=ALWAYS)
    company = make_company(run, {1: DOUBLED})

    results = company.run(3)

    (verdict,) = company.verdicts
    assert (verdict.offence, verdict.stage, verdict.party, verdict.step) == ("gradient", 1, "worker-1", 0)
    assert [result.guard.attempts for result in results] == [2, 1, 1]
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_an_auditor_that_makes_up_another_weight_gradient_is_named(make_company, honest_digest):
    run = tiny_run(guard=ALWAYS)
    liar = Actor(
        rewrite=rewrite_only(StepAudited, lambda outgoing, audited: [outgoing.with_fields({"gradient": "0" * 64})])
    )
    company = make_company(run, {2: liar})

    company.run(2)

    assert [(verdict.offence, verdict.party) for verdict in company.verdicts] == [("gradient", "worker-2")]
    assert company.weights_digest() == honest_digest(run, 2)


def test_the_evidence_of_a_whole_step_is_redone_by_whoever_reads_it(make_company):
    company = make_company(tiny_run(guard=ALWAYS), {1: DOUBLED})
    company.run(1)
    (verdict,) = company.verdicts

    facts = explain_evidence(company.run_dir / str(verdict.evidence))

    assert facts["recomputed here"] == "bit-equal to the referee's result"
    assert facts["weights"] == "their digest was signed by worker-1 and worker-2"
    assert str(facts["conclusion"]).startswith("holds: worker-1")
