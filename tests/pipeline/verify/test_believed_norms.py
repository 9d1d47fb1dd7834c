"""What a stage says of its gradient's norm: nonsense convicts it, a plausible lie that is not checked is bounded."""

import pytest
from snapshot_runs import SNAPSHOT

from phalanx.pipeline import GuardConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import Commit, GradientHeld, StepAudited
from phalanx.pipeline.verify.facts import FACTOR, KnownNorms
from phalanx.testing import Actor, only, tiny_run

QUIET = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}
UPDATE = GuardConfig(shadow="update", **QUIET)
NONSENSE = [-1e30, 1e308, -5e-324, 1.7e308]


def with_fields(kind, norm, step=2):
    return Actor(
        rewrite=only(
            kind,
            lambda outgoing, said: [outgoing.with_fields({"norm_squared": norm}) if said.step == step else outgoing],
        )
    )


def scaled(factor, from_step):
    def lie(outgoing, commit):
        wrong = {"norm_squared": factor(commit.step) * commit.norm_squared}
        return [outgoing.with_fields(wrong) if commit.step >= from_step else outgoing]

    return Actor(rewrite=only(Commit, lie))


@pytest.mark.parametrize(
    ("guard", "norm"),
    [
        *(
            pytest.param(GuardConfig(**QUIET), norm, id=f"gradient-{norm}", marks=pytest.mark.slow if at else ())
            for at, norm in enumerate(NONSENSE)
        ),
        *(pytest.param(guard, NONSENSE[0], id=f"{guard.shadow}-{NONSENSE[0]}") for guard in (UPDATE, SNAPSHOT)),
        *(
            pytest.param(guard, norm, id=f"{guard.shadow}-{norm}", marks=pytest.mark.slow)
            for guard in (UPDATE, SNAPSHOT)
            for norm in NONSENSE[1:]
        ),
    ],
)
def test_a_norm_that_nothing_can_have_convicts_who_signed_it(make_company, honest_digest, norm, guard):
    run = tiny_run(guard=guard)
    company = make_company(run, {1: with_fields(Commit, norm)})
    if guard.verify_only:
        # nobody else could go on with the stage
        company.run(2)
        company.save()
        with pytest.raises(Exception, match="worker-1"):
            company.run(1)
    else:
        company.run(4)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.step, verdict.stage) == ("worker-1", "forgery", 2, 1)
    facts = explain_evidence(company.run_dir / str(verdict.evidence))
    assert facts["rests on the owner's word"] == "nothing"
    assert "norm_squared" in facts["conclusion"]
    if not guard.verify_only:
        assert company.weights_digest() == honest_digest(run, 4)


@pytest.mark.parametrize("kind", [GradientHeld, pytest.param(StepAudited, marks=pytest.mark.slow)])
def test_so_does_such_a_norm_in_the_word_of_a_shadow(make_company, honest_digest, kind):
    run = tiny_run(guard=GuardConfig(step_audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, {2: with_fields(kind, -1e30)})

    company.run(4)

    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-2", "forgery")]
    assert company.weights_digest() == honest_digest(run, 4)


@pytest.mark.parametrize(
    "factor", [30 * FACTOR**2, *(pytest.param(factor, marks=pytest.mark.slow) for factor in (1e60, 1e-12))]
)
def test_a_plausible_lie_about_a_norm_that_would_bend_every_update_is_looked_into_at_once(
    make_company, honest_digest, factor
):
    # no audit was drawn: the owner's rate is 0
    run = tiny_run(guard=SNAPSHOT)
    company = make_company(run, {1: scaled(lambda step: factor, 2)})

    company.run(4)

    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [("worker-1", "gradient", 2)]
    assert company.weights_digest() == honest_digest(run, 4)


def test_a_lie_that_grows_a_little_each_step_is_met_before_it_is_large(make_company, honest_digest):
    run = tiny_run(guard=SNAPSHOT)
    company = make_company(run, {1: scaled(lambda step: 6.0 ** (step - 1), 2)})

    company.run(9)

    ((party, offence, step),) = [(v.party, v.offence, v.step) for v in company.verdicts]
    assert (party, offence) == ("worker-1", "gradient")
    assert step < 9


@pytest.mark.slow
def test_an_honest_run_has_few_of_these_audits(make_company, honest_digest):
    run = tiny_run(guard=SNAPSHOT.model_copy(update={"audit_rate": 1e-6}))
    company = make_company(run)

    results = company.run(9)

    # the first step of each of the two stages in other hands, and hardly anything after it
    assert results[0].guard.num_audits >= 8
    assert sum(result.guard.num_audits for result in results[1:]) <= 16
    assert (company.verdicts, company.weights_digest()) == ([], honest_digest(run, 9))


def test_what_is_near_the_known_norm_is_believed():
    norms = KnownNorms()
    assert norms.is_odd(1, 1.0)

    norms.note(1, 1.0)

    assert not norms.is_odd(1, FACTOR**2)
    assert norms.is_odd(1, 1.001 * FACTOR**2)
    assert norms.is_odd(1, 0.999 / FACTOR**2)
    assert norms.is_odd(2, 1.0)


def test_a_stage_without_a_gradient_may_say_nothing_else():
    norms = KnownNorms()
    norms.note(1, 0.0)

    assert not norms.is_odd(1, 0.0)
    assert norms.is_odd(1, 1e-30)
