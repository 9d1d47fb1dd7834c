"""Verdicts one step behind the optimizers: whatever was applied too early is undone, and nothing else changes."""

import pytest
import torch
from latecomers import all_late, late

from phalanx.lab.attacks import make_actor
from phalanx.models import LoraConfig
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import AuditReport, ProgressReport, UpdateReport
from phalanx.testing import Actor, crash_at, rewrite_only, tampering, tiny_run

LIE = 1
STEPS = 4
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}


def lagging(**changes):
    return GuardConfig(commit_lag=1, **{**NO_COIN, "screen": False, **changes})


def attacker(tmp_path, kind, stage, **changes):
    config = AttackConfig(kind=kind, stages=(stage,), from_step=LIE, **changes)
    return {stage: make_actor(config, f"worker-{stage}", tmp_path / "attack.jsonl")}


def lying(at=LIE, factor=-1.0, direction="forward"):
    """A stage that tells one lie, in one step."""
    return Actor(
        tampering(lambda found, step, m, tensor: tensor * factor if (found, step) == (direction, at) else tensor)
    )


IMPATIENT = PipelineConfig(stages=4, step_timeout_s=30.0, patience_s=0.5)


def stalled_at(step, actor=None, said=None):
    """An auditor that says nothing about a step before the owner asks which party is silent."""
    said = [] if said is None else said
    slow = late(actor, until=ProgressReport, holds=lambda message: message.step == step)

    def rewrite(outgoing):
        found = slow.rewrite(outgoing)
        said.extend((other.message.kind, other.message.step) for other in found if hasattr(other.message, "step"))
        return found

    return Actor(slow.wrap_copy, rewrite)


def went_back(company):
    return [(body["to"], body["step"]) for body in company.event_bodies("rolled_back")]


THREE, FOUR, FIVE = (
    (PipelineConfig(stages=3, schedule="gpipe", step_timeout_s=30.0), {}),
    (PipelineConfig(stages=4, step_timeout_s=30.0), {"adapter": LoraConfig(rank=2)}),
    (PipelineConfig(stages=5, spares=1, step_timeout_s=30.0), {}),
)


@pytest.mark.quick_cases("pipeline0-*")
@pytest.mark.parametrize(
    ("pipeline", "changes", "rate"),
    [
        (*THREE, 1.0),
        (*FOUR, 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((*THREE, 0.0), (*FOUR, 1.0), (*FIVE, 0.0), (*FIVE, 1.0))
        ),
    ],
)
def test_honest_parties_get_the_bits_of_an_unguarded_run(make_company, honest_digest, pipeline, changes, rate):
    run = tiny_run(pipeline=pipeline, guard=lagging(audit_rate=1.0, step_audit_rate=rate, screen=True), **changes)
    company = make_company(run)

    results = company.run(STEPS)

    assert company.weights_digest() == honest_digest(run, STEPS)
    assert (company.verdicts, company.event_bodies("alarm"), went_back(company)) == ([], [], [])
    middle = pipeline.stages - 2
    assert [(result.guard.attempts, result.guard.num_audits) for result in results] == [(1, middle * 4)] * STEPS


@pytest.mark.slow
def test_steps_are_applied_before_their_audits_are_in(make_company, honest_digest):
    run = tiny_run(guard=lagging(audit_rate=0.5))
    company = make_company(run, all_late({}))

    company.run(STEPS)

    assert company.weights_digest() == honest_digest(run, STEPS)
    assert (company.verdicts, company.lost, went_back(company)) == ([], [], [])


@pytest.mark.slow
def test_audits_that_lag_are_done_where_gradients_are_switched_off(make_company, honest_digest):
    # in three stages the owner is the shadow, and a validation runs without gradients
    run = tiny_run(3, guard=lagging(audit_rate=1.0))
    company = make_company(run, {1: lying()})
    company.run(LIE + 1)

    with torch.no_grad():
        digest = company.weights_digest()

    assert company.evicted == ["worker-1"]
    assert digest == honest_digest(run, LIE + 1)


MESSAGES = [
    ("sign_flip", 1, {"direction": "forward"}),
    pytest.param("sign_flip", 2, {"direction": "backward"}, marks=pytest.mark.slow),
    pytest.param("drift", 2, {"strength": 1e-4, "direction": "forward"}, marks=pytest.mark.slow),
    pytest.param("lazy_bf16", 1, {}, marks=pytest.mark.slow),
    ("crash_when_challenged", 1, {}),
]


@pytest.mark.quick_cases("crash_when_challenged-*")
@pytest.mark.parametrize(("kind", "stage", "changes"), MESSAGES)
def test_a_lie_that_was_applied_is_undone_and_its_author_named(
    make_company, honest_digest, tmp_path, kind, stage, changes
):
    run = tiny_run(guard=lagging(audit_rate=1.0))
    company = make_company(run, all_late(attacker(tmp_path, kind, stage, **changes)))

    results = company.run(STEPS)

    assert company.weights_digest() == honest_digest(run, STEPS)
    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [(f"worker-{stage}", LIE, "message")]
    assert company.evicted == [f"worker-{stage}"]
    assert went_back(company) == [(LIE, LIE + 1)]
    assert [result.guard.steps_redone for result in results] == [0, 0, 1, 0]
    assert [result.guard.attempts for result in results] == [1, 1, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_made_up_gradient_that_was_applied_is_undone(make_company, honest_digest, tmp_path, stage):
    run = tiny_run(guard=lagging(step_audit_rate=1.0))
    company = make_company(run, all_late(attacker(tmp_path, "gradient_sign", stage)))

    company.run(STEPS)

    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [(f"worker-{stage}", LIE, "gradient")]
    assert went_back(company) == [(LIE, LIE + 1)]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_a_wrong_learning_rate_takes_the_step_before_with_it(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=lagging())
    company = make_company(run, all_late(attacker(tmp_path, "wrong_learning_rate", 1, strength=1.01)))

    company.run(STEPS)

    # the attack makes another update of the step before, which is applied and not yet audited
    (verdict,) = company.verdicts
    assert (verdict.party, verdict.step, verdict.offence) == ("worker-1", LIE, "state")
    assert went_back(company) == [(LIE - 1, LIE)]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_a_false_accusation_about_an_applied_step_names_the_accuser(make_company, honest_digest):
    run = tiny_run(guard=lagging())

    def accuse(outgoing, report):
        lie = {"digests": {**report.digests, "backward": "5" * 64}}
        return [outgoing.with_fields(lie) if report.step == LIE else outgoing]

    company = make_company(run, all_late({2: Actor(rewrite=rewrite_only(AuditReport, accuse))}))

    company.run(STEPS)

    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [("worker-2", LIE, "accusation")]
    assert went_back(company) == [(LIE, LIE + 1)]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_dies_while_a_step_lags_costs_that_step_and_is_not_blamed(make_company, honest_digest, stage):
    run = tiny_run(pipeline=IMPATIENT, guard=lagging(audit_rate=1.0))
    company = make_company(run, {stage: Actor(crash_at(LIE + 1)), 3 - stage: stalled_at(LIE)})

    results = company.run(STEPS)

    assert (company.lost, company.verdicts) == ([f"worker-{stage}"], [])
    assert went_back(company) == [(LIE, LIE + 1)]
    assert [result.guard.steps_redone for result in results] == [0, 0, 1, 0]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.parametrize("kind", ["withholding", pytest.param("withheld_answer", marks=pytest.mark.slow)])
def test_what_is_withheld_while_a_step_lags_is_handed_on(make_company, honest_digest, tmp_path, kind):
    pipeline = PipelineConfig(stages=5, step_timeout_s=30.0, patience_s=0.5)
    run = tiny_run(pipeline=pipeline, guard=lagging(audit_rate=1.0))
    company = make_company(run, attacker(tmp_path, kind, 1))

    company.run(LIE + 1)

    assert company.weights_digest() == honest_digest(run, LIE + 1)
    assert (company.lost, company.verdicts, went_back(company)) == ([], [], [])


@pytest.mark.slow
def test_two_liars_in_turn_leave_no_trace(make_company, honest_digest):
    pipeline = PipelineConfig(stages=5, spares=1, step_timeout_s=30.0)
    run = tiny_run(pipeline=pipeline, guard=lagging(audit_rate=1.0))
    company = make_company(run, all_late({1: lying(1), 3: lying(1, direction="backward")}, stages=6))

    company.run(STEPS)

    assert sorted(company.evicted) == ["worker-1", "worker-3"]
    assert went_back(company) == [(1, 2), (1, 2)]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_across_numeric_classes_a_drift_that_was_applied_is_found(make_company, honest_digest):
    run = tiny_run(guard=lagging(audit_rate=1.0, classes="mixed"))
    liar = Actor(lying(factor=1.001).wrap_copy, numeric_class="another build")
    company = make_company(run, all_late({2: liar}))

    company.run(STEPS)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.step) == ("worker-2", LIE)
    assert verdict.distance == pytest.approx(1e-3, rel=0.2)
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_across_numeric_classes_honest_rounding_in_an_applied_step_is_no_alarm(make_company):
    run = tiny_run(guard=lagging(audit_rate=1.0, classes="mixed"))
    other = Actor(lying(factor=1 + 1e-6).wrap_copy, numeric_class="another build")
    company = make_company(run, all_late({2: other}))

    company.run(LIE + 2)

    assert (company.verdicts, company.event_bodies("alarm"), company.lost) == ([], [], [])


@pytest.mark.slow
def test_a_step_that_the_owner_audits_does_not_lag(make_company, honest_digest):
    pipeline = PipelineConfig(stages=5, step_timeout_s=30.0, patience_s=0.5)
    run, said = tiny_run(pipeline=pipeline, guard=lagging(audit_rate=1.0, owner_audit_rate=1.0)), []
    company = make_company(run, {1: lying(), 2: stalled_at(LIE, said=said)})

    company.run(STEPS)

    assert [(v.party, v.step) for v in company.verdicts] == [("worker-1", LIE)]
    assert went_back(company) == []
    assert said.index((AuditReport.kind, LIE)) < said.index((UpdateReport.kind, LIE + 1))
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_a_loss_that_is_no_number_waits_for_the_audits(make_company, honest_digest):
    run = tiny_run(pipeline=IMPATIENT, guard=lagging(audit_rate=1.0, classes="mixed"))
    liar = Actor(lying(factor=float("nan")).wrap_copy, numeric_class="another build")
    company = make_company(run, {2: liar, 1: stalled_at(LIE)})

    results = company.run(STEPS)

    assert [(v.party, v.step) for v in company.verdicts] == [("worker-2", LIE)]
    assert (went_back(company), results[LIE].guard.attempts) == ([], 2)
    assert company.weights_digest() == honest_digest(run, STEPS)


def test_the_next_step_is_not_decided_before_the_audits_of_the_last_one(make_company, honest_digest):
    run, said = tiny_run(pipeline=IMPATIENT, guard=lagging()), []
    company = make_company(run, {2: stalled_at(LIE, said=said)})

    company.run(LIE + 3)

    assert (company.lost, company.verdicts, went_back(company)) == ([], [], [])
    report, step_after = said.index((AuditReport.kind, LIE)), said.index((UpdateReport.kind, LIE + 2))
    assert said.index((UpdateReport.kind, LIE + 1)) < report < step_after
    assert company.weights_digest() == honest_digest(run, LIE + 3)


@pytest.mark.slow
def test_a_lie_whose_auditor_is_stalled_is_undone_before_a_second_step_is_applied(make_company, honest_digest):
    run = tiny_run(pipeline=IMPATIENT, guard=lagging(audit_rate=1.0))
    company = make_company(run, {1: lying(), 2: stalled_at(LIE)})

    company.run(LIE + 3)

    assert [(v.party, v.step) for v in company.verdicts] == [("worker-1", LIE)]
    assert went_back(company) == [(LIE, LIE + 1)]
    assert company.weights_digest() == honest_digest(run, LIE + 3)


def test_a_checkpoint_never_holds_a_step_that_is_not_verified(make_company, honest_digest):
    run = tiny_run(pipeline=IMPATIENT, guard=lagging(audit_rate=1.0))
    company = make_company(run, {1: lying(), 2: stalled_at(LIE)})
    company.run(LIE + 1)

    company.save_step()

    assert [(v.party, v.step) for v in company.verdicts] == [("worker-1", LIE)]
    assert company.fall_back() == LIE + 1
    assert company.weights_digest() == honest_digest(run, LIE + 1)


def test_an_auditor_that_never_speaks_of_an_applied_step_is_replaced(make_company, honest_digest):
    run = tiny_run(pipeline=IMPATIENT, guard=lagging())
    silent = rewrite_only(AuditReport, lambda outgoing, report: [] if report.step == LIE else [outgoing])
    company = make_company(run, {2: Actor(rewrite=silent)})

    company.run(LIE + 3)

    assert (company.lost, company.verdicts) == (["worker-2"], [])
    assert went_back(company) == [(LIE, LIE + 1)]
    assert company.weights_digest() == honest_digest(run, LIE + 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "off"}, 'commit_lag = 1 with mode = "off"'),
        ({"shadow": "lockstep"}, 'commit_lag = 1 with shadow = "lockstep"'),
        ({"commit_lag": 2}, "less than or equal to 1"),
    ],
)
def test_a_lag_is_refused_where_nothing_could_undo_a_step(changes, reason):
    with pytest.raises(ValueError, match=reason):
        GuardConfig(**{"commit_lag": 1, **changes})
