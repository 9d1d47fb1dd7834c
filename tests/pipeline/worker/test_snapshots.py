"""Shadows that are sent a snapshot now and then, to which the whole company goes back when roles change."""

import pytest
from snapshot_runs import (
    ALONE,
    IMPATIENT,
    NO_COIN,
    SNAPSHOT,
    SPARE,
    audit_at,
    found,
    lying_from,
    run_with,
    went_back,
)

from phalanx.lab.attacks import actor
from phalanx.models import LoraConfig
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import Bulk, UpdateReport
from phalanx.testing import Actor, WorkerCrash, only, tampering, tiny_run

# --- honest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "changes"),
    [
        (None, {"step_audit_rate": 1.0, "owner_audit_rate": 1.0}),
        (SPARE, {"audit_rate": 1.0}),
        pytest.param(ALONE, {"audit_rate": 0.5, "step_audit_rate": 0.5}, marks=pytest.mark.slow),
        pytest.param(None, {}, marks=pytest.mark.slow),
        pytest.param(None, {"audit_rate": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_snapshots_change_no_bit_whoever_keeps_them(make_company, honest_digest, pipeline, changes):
    run = run_with(pipeline, **changes)
    company = make_company(run)

    company.run(5)

    assert company.weights_digest() == honest_digest(run, 5)
    assert (company.verdicts, company.lost, company.bodies("fault"), company.bodies("refused")) == ([], [], [], [])


@pytest.mark.slow
def test_the_weights_are_those_of_the_gradient_upkeep(make_company):
    digests = set()
    for guard in (SNAPSHOT, GuardConfig(**NO_COIN)):
        company = make_company(tiny_run(guard=guard))
        company.run(4)
        digests.add(company.weights_digest())

    assert len(digests) == 1


def test_a_stage_sends_its_state_every_so_many_steps_and_weights_in_audited_ones_alone(make_company):
    sent = []

    def note(outgoing, bulk):
        if bulk.stage == 1 and bulk.offset == 0:
            sent.append((bulk.purpose, bulk.step))
        return [outgoing]

    company = audit_at(make_company(run_with(), {1: Actor(rewrite=only(Bulk, note))}), (1, 1), (1, 4))

    results = company.run(8)

    assert sent == [("weights", 1), ("snapshot", 3), ("weights", 4), ("snapshot", 6)]
    assert [result.guard.num_audits for result in results] == [0, 4, 0, 0, 4, 0, 0, 0]


def test_a_coin_draws_all_microbatches_of_a_step_as_often_as_others_draw_some(make_company):
    company = make_company(run_with(audit_rate=0.25))
    coins = [company.draw.all_messages(step=step, epoch=0, stage=1) for step in range(4000)]

    # four standard deviations of a fair draw at this rate
    assert abs(sum(coins) / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


def test_adapters_can_be_kept_by_snapshots(make_company, honest_digest):
    pytest.importorskip("peft")
    run = tiny_run(guard=SNAPSHOT.model_copy(update={"audit_rate": 1.0}), adapter=LoraConfig(rank=2))
    company = make_company(run)
    company.run(4)

    company.kill("worker-1")
    company.run(2)

    assert (company.verdicts, company.lost) == ([], ["worker-1"])
    assert company.weights_digest() == honest_digest(run, 6)


# --- going back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "dies_before", "back_to"),
    [
        (None, 4, 3),
        (SPARE, 2, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((None, 1, 0), (None, 8, 6), (SPARE, 5, 3), (ALONE, 5, 3))
        ),
    ],
)
def test_a_holder_that_dies_between_snapshots_costs_the_steps_since_the_last_one(
    make_company, honest_digest, pipeline, dies_before, back_to
):
    run = run_with(pipeline)
    company = make_company(run)
    company.run(dies_before)

    company.kill("worker-1")
    results = company.run(2)

    assert went_back(company) == [(back_to, dies_before)]
    assert sum(result.guard.steps_redone for result in results) == dies_before - back_to
    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert company.weights_digest() == honest_digest(run, dies_before + 2)


def test_a_holder_that_dies_before_its_snapshot_is_handed_over_is_replaced_from_the_one_before(
    make_company, honest_digest
):
    def die(outgoing, bulk):
        return [] if bulk.purpose == "snapshot" and bulk.step == 6 else [outgoing]

    run = run_with(IMPATIENT)
    company = make_company(run, {1: Actor(rewrite=only(Bulk, die))})

    company.run(8)

    # what is withheld from the shadow is withheld from the owner too: it is replaced and not blamed
    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert went_back(company) == [(3, 6)]
    assert company.weights_digest() == honest_digest(run, 8)


@pytest.mark.slow
def test_a_loss_right_after_all_have_the_snapshot_costs_no_step(make_company, honest_digest):
    company = make_company(run_with())
    company.run(6)
    # waits until the states after the sixth update are agreed on, snapshots included
    company.weights_digest()

    company.kill("worker-1")
    results = company.run(2)

    assert went_back(company) == []
    assert [result.guard.steps_redone for result in results] == [0, 0]
    assert company.weights_digest() == honest_digest(run_with(), 8)


@pytest.mark.slow
def test_losses_one_after_the_other_end_with_the_same_bits(make_company, honest_digest):
    run = tiny_run(guard=SNAPSHOT, pipeline=PipelineConfig(stages=5, spares=1, step_timeout_s=30.0))
    company = make_company(run)
    company.run(2)
    company.kill("worker-1")
    company.run(3)
    company.kill("worker-3")
    company.run(3)
    company.kill("worker-2")
    company.run(2)

    assert sorted(company.lost) == ["worker-1", "worker-2", "worker-3"]
    assert company.weights_digest() == honest_digest(run, 10)


@pytest.mark.slow
def test_a_run_of_one_step_between_snapshots_redoes_the_interrupted_step_alone(make_company, honest_digest):
    def die_with_the_snapshot_unconfirmed(outgoing, report):
        if report.step == 2:
            raise WorkerCrash("after step 2, before the owner knows of its snapshot")
        return [outgoing]

    run = run_with(snapshot_every=1)
    company = make_company(run, {2: Actor(rewrite=only(UpdateReport, die_with_the_snapshot_unconfirmed))})

    results = company.run(5)

    # the snapshot that follows step 2 is everybody's only when all have confirmed it
    assert company.lost == ["worker-2"]
    assert sum(result.guard.steps_redone for result in results) == 1
    assert company.weights_digest() == honest_digest(run, 5)


# --- liars ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_liar_is_named_when_the_coin_falls_and_what_it_did_since_the_snapshot_is_undone(
    make_company, honest_digest, stage
):
    company = audit_at(make_company(run_with(), {stage: lying_from(4)}), (stage, 5))

    results = company.run(8)

    assert found(company) == [(f"worker-{stage}", "message", 5)]
    assert went_back(company) == [(3, 5)]
    assert sum(result.guard.steps_redone for result in results) == 2
    assert company.weights_digest() == honest_digest(run_with(), 8)


@pytest.mark.slow
def test_a_conviction_right_after_a_snapshot_goes_back_to_the_one_before(make_company, honest_digest):
    company = audit_at(make_company(run_with(), {1: lying_from(5)}), (1, 6))

    company.run(8)

    # what it did in step 5 is in the snapshot of step 6, which all had confirmed when it was named
    assert found(company) == [("worker-1", "message", 6)]
    assert went_back(company) == [(3, 6)]
    assert company.weights_digest() == honest_digest(run_with(), 8)


def test_a_liar_is_named_in_its_first_step_when_every_step_is_audited(make_company, honest_digest):
    run = run_with(audit_rate=1.0)
    company = make_company(run, {1: lying_from(2)})

    company.run(6)

    assert found(company) == [("worker-1", "message", 2)]
    facts = explain_evidence(company.run_dir / str(company.verdicts[0].evidence))
    assert facts["conclusion"].startswith("holds: worker-1")
    assert company.weights_digest() == honest_digest(run, 6)


@pytest.mark.slow
def test_a_lie_that_no_coin_met_before_a_snapshot_stays(make_company, honest_digest):
    # sharp edge 4: a snapshot is what its holder signed, not what a lie would have to be undone from
    company = audit_at(make_company(run_with(), {1: lying_from(2)}), (1, 5))

    company.run(8)

    assert went_back(company) == [(3, 5)]
    assert company.weights_digest() != honest_digest(run_with(), 8)


def test_an_odd_message_is_audited_at_once_with_weights_that_are_fetched(make_company, honest_digest):
    company = audit_at(make_company(run_with(), {1: actor(AttackConfig(kind="nan", from_step=4), "worker-1")}))

    company.run(6)

    assert found(company) == [("worker-1", "message", 4)]
    assert company.bodies("screen_hit")
    assert company.weights_digest() == honest_digest(run_with(), 6)


def test_a_made_up_weight_gradient_is_found_in_an_audit_of_the_whole_step(make_company, honest_digest):
    twisted = Actor(tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()}))
    run = run_with(step_audit_rate=1.0)
    company = make_company(run, {1: twisted})

    company.run(3)

    assert found(company) == [("worker-1", "gradient", 0)]
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.parametrize(
    "kind",
    [
        "skipped_update",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wrong_learning_rate", "weight_drift")),
    ],
)
def test_the_owner_names_a_stage_that_bends_the_update_and_the_run_goes_back(make_company, honest_digest, kind):
    run = run_with(owner_audit_rate=1.0)
    company = make_company(run, {1: actor(AttackConfig(kind=kind, from_step=4), "worker-1")})

    company.run(7)

    assert found(company) == [("worker-1", "state", 4)]
    assert went_back(company) == [(3, 4)]
    assert company.weights_digest() == honest_digest(run, 7)
