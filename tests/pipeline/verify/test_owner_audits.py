"""A stage and its shadow that lie together meet the one auditor that they cannot have on their side."""

import pytest
from leagues import league_of_gradients, league_of_messages

from phalanx.optimizers import StageOptimizer
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import Bulk
from phalanx.testing import Actor, tiny_run

OFTEN = GuardConfig(owner_audit_rate=1.0, screen=False)
NEVER = GuardConfig(owner_audit_rate=0.0, screen=False)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_stage_and_its_shadow_that_lie_together_win_without_the_owners_audits(make_company, honest_digest, direction):
    run = tiny_run(guard=NEVER)
    company = make_company(run, league_of_messages(direction))

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run, 2)


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_the_owners_audit_names_the_stage_and_its_accomplice(make_company, honest_digest, direction):
    run = tiny_run(guard=OFTEN)
    company = make_company(run, league_of_messages(direction))

    company.run(2)

    found = [(verdict.offence, verdict.party, verdict.stage) for verdict in company.verdicts]
    assert found == [("message", "worker-1", 1), ("collusion", "worker-2", 1)]
    assert company.weights_digest() == honest_digest(run, 2)
    for verdict in company.verdicts:
        facts = explain_evidence(company.run_dir / str(verdict.evidence))
        assert str(facts["conclusion"]).startswith(f"holds: {verdict.party} signed")


def test_the_owners_audit_names_a_league_that_makes_up_a_weight_gradient(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(owner_audit_rate=1.0, step_audit_rate=1.0))
    company = make_company(run, league_of_gradients())

    company.run(2)

    found = [(verdict.offence, verdict.party) for verdict in company.verdicts]
    assert found == [("gradient", "worker-1"), ("collusion", "worker-2")]
    assert company.weights_digest() == honest_digest(run, 2)


class _Stale(StageOptimizer):
    """Takes every update at a tenth of its learning rate, in the hands of both members of a league."""

    def step(self, gradients, lr, clip_coefficient):
        super().step(gradients, lr / 10, clip_coefficient)


@pytest.mark.slow
def test_the_owners_audit_names_a_league_that_bends_the_update(make_company):
    def bend(copy, held):
        if copy.spec.index == 1:
            copy.optimizer.__class__ = _Stale
        return copy

    league = {1: Actor(bend), 2: Actor(bend)}
    blind = make_company(tiny_run(guard=NEVER), league)
    seeing = make_company(tiny_run(guard=OFTEN), league)

    blind.run(3)
    seeing.run(3)

    assert blind.verdicts == []
    assert {(verdict.offence, verdict.party, verdict.stage) for verdict in seeing.verdicts} == {
        ("state", "worker-1", 1),
        ("state", "worker-2", 1),
    }


def test_honest_workers_pass_the_owners_audits(make_company, honest_digest):
    run = tiny_run(guard=OFTEN)
    company = make_company(run)

    company.run(3)

    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_league_is_found_within_the_bound_that_the_rate_promises(make_company):
    # at a rate of one half, 20 steps without an audit happen once in a million runs
    run = tiny_run(guard=GuardConfig(owner_audit_rate=0.5, screen=False))
    company = make_company(run, league_of_messages("forward"))

    company.run(20)

    assert {verdict.party for verdict in company.verdicts} == {"worker-1", "worker-2"}


@pytest.mark.slow
def test_what_a_league_did_before_it_was_found_is_undone_from_kept_states(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(owner_audit_rate=0.0, screen=False, keep_states=8))
    company = make_company(run, league_of_messages("forward"))
    company.draw.draws_owner_audit = lambda *, step, epoch, stage: step == 5

    company.run(8)

    assert [verdict.party for verdict in company.verdicts] == ["worker-1", "worker-2"]
    assert [(body["to"], body["step"]) for body in company.event_bodies("rolled_back")] == [(0, 5)]
    assert company.weights_digest() == honest_digest(run, 8)


def test_an_update_that_a_league_bent_is_undone_from_kept_states(make_company, honest_digest):
    def bend(copy, held):
        if copy.spec.index == 1:
            copy.optimizer.__class__ = _Stale
        return copy

    run = tiny_run(guard=GuardConfig(owner_audit_rate=1.0, keep_states=8))
    company = make_company(run, {1: Actor(bend), 2: Actor(bend)})

    company.run(4)

    assert {verdict.party for verdict in company.verdicts} == {"worker-1", "worker-2"}
    assert company.weights_digest() == honest_digest(run, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "purpose"),
    [("mixed", "gradient"), pytest.param("one", "state", marks=pytest.mark.slow)],
)
def test_honest_copies_that_are_cut_off_while_the_owner_audits_them_are_replaced_and_not_blamed(
    make_company, honest_digest, classes, purpose
):
    def cut_off(outgoing):
        """Leave unsent what the owner asks both copies of stage 1 for, as two machines without power would."""
        message = outgoing.message
        is_answer = isinstance(message, Bulk) and (message.purpose, message.stage, message.step) == (purpose, 1, 1)
        return [] if is_answer and outgoing.receiver == OWNER else [outgoing]

    rates = {"owner_audit_rate": 1.0, "step_audit_rate": 0.0, "gradient_screen": False, "screen": False}
    pipeline = PipelineConfig(stages=4, spares=2, step_timeout_s=60.0, patience_s=0.4)
    run = tiny_run(guard=GuardConfig(classes=classes, **rates), pipeline=pipeline)
    # one spare shadows stage 1
    company = make_company(run, dict.fromkeys((1, 3), Actor(rewrite=cut_off)))
    assert company.engine.stage_shadows[1] == "worker-3"

    company.run(3)

    assert (company.verdicts, company.evicted) == ([], [])
    assert company.lost != []
    assert [body["why"] for body in company.event_bodies("verdict_refused")] == [
        "it did not send its signed data, which does not prove a lie"
    ]
