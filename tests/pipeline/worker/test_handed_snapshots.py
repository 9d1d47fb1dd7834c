"""What a stage hands its shadow as a snapshot, and shows an auditor that has no weights: nothing is believed."""

import pytest
import torch
from pydantic import ValidationError
from snapshot_runs import (
    ALONE,
    EVERY,
    IMPATIENT,
    NO_COIN,
    SNAPSHOT,
    SPARE,
    audit_at,
    doubled,
    found,
    lying_from,
    run_with,
    went_back,
)

from phalanx.errors import FrameError, StaleReplicaError
from phalanx.models import open_model
from phalanx.pipeline import GuardConfig, PipelineConfig, StageCopy
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol import tensor_stream as bulk
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Bulk, Commit, FetchBulk, Ready, WeightsHeld
from phalanx.pipeline.protocol.signed import Statements
from phalanx.pipeline.protocol.tensor_stream import tensors_digest
from phalanx.pipeline.stage.snapshot import KeptStage
from phalanx.pipeline.stage.stage_copy import state_digest
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.pipeline.worker.snapshot_receiver import SnapshotReceiver
from phalanx.telemetry import PhaseTimer
from phalanx.testing import Actor, only, tiny_run
from phalanx.train.setup.layout import make_plan


def sending_another_snapshot(step):
    """What a stage uses and signs is honest; the snapshot that it sends its shadow is not."""

    def alter(outgoing, bulk):
        spoilt = bulk.purpose == "snapshot" and bulk.step == step
        return [type(outgoing)(outgoing.receiver, bulk, doubled(outgoing.payload))] if spoilt else [outgoing]

    return Actor(rewrite=only(Bulk, alter))


@pytest.mark.parametrize("pipeline", [None, pytest.param(ALONE, marks=pytest.mark.slow)], ids=["worker", "owner"])
def test_a_false_snapshot_convicts_its_sender_by_its_own_signatures(make_company, honest_digest, pipeline):
    run = run_with(pipeline)
    company = make_company(run, {1: sending_another_snapshot(6)})

    company.run(8)

    assert found(company) == [("worker-1", "state", 6)]
    assert went_back(company) == [(3, 6)]
    facts = explain_evidence(company.run_dir / str(company.verdicts[0].evidence))
    assert facts["conclusion"] == "holds: worker-1 sent another snapshot than the one whose digest it signed"
    assert facts["rests on the owner's word"] == "nothing"
    assert company.weights_digest() == honest_digest(run, 8)


def test_moments_alone_make_a_snapshot_false(make_company, honest_digest):
    def alter(outgoing, bulk):
        if bulk.purpose != "snapshot":
            return [outgoing]
        # names are sent in order: exp_avg/... comes first
        payload = bytes(4) + outgoing.payload[4:]
        return [type(outgoing)(outgoing.receiver, bulk, payload)]

    company = make_company(run_with(), {1: Actor(rewrite=only(Bulk, alter))})

    company.run(4)

    assert found(company) == [("worker-1", "state", 3)]
    assert company.weights_digest() == honest_digest(run_with(), 4)


@pytest.mark.parametrize("guard", [SNAPSHOT, GuardConfig(**NO_COIN)], ids=["snapshot", "gradient"])
def test_a_part_that_does_not_fit_among_others_frames_no_shadow(make_company, honest_digest, monkeypatch, guard):
    # a state in many parts; with one of them alone the first would begin the transfer anew
    monkeypatch.setattr(bulk, "PART_BYTES", 4096)
    purpose = "snapshot" if guard.keeps_snapshots else "gradient"

    def alter(outgoing, message):
        if (message.purpose, message.step) != (purpose, 3):
            return [outgoing]
        if message.offset == 0:
            return [outgoing, outgoing.with_fields({"offset": 5})]
        # with a gradient it is enough that the shadow shows one part more than was committed to
        return (
            [type(outgoing)(outgoing.receiver, message, doubled(outgoing.payload))] if guard is SNAPSHOT else [outgoing]
        )

    run = tiny_run(guard=guard)
    company = make_company(run, {1: Actor(rewrite=only(Bulk, alter))})

    company.run(5)

    expected = [("worker-1", "state", 3)] if guard is SNAPSHOT else []
    assert found(company) == expected
    assert company.weights_digest() == honest_digest(run, 5)


@pytest.mark.parametrize(
    ("field", "is_shown"),
    [("weights", False), pytest.param("moments", False, marks=pytest.mark.slow), ("frozen", True)],
)
def test_a_shadow_that_lies_about_the_snapshot_that_it_was_sent_is_named_or_replaced(
    make_company, honest_digest, field, is_shown
):
    def lie(outgoing, held):
        state = held.state
        changes = {
            "weights": {"weights": state.weights[:-64] + "3" * 64},
            "moments": {"moments": "3" * 64},
            "frozen": {"weights": "3" * 64 + state.weights[-64:]},
        }
        return [outgoing.with_fields({"state": state.model_copy(update=changes[field])})]

    run = run_with(SPARE)
    company = make_company(run, {2: Actor(rewrite=only(WeightsHeld, lie))})
    assert dict(company.engine.shadows) == {1: "worker-2"}

    company.run(5)

    # what has the digest that it signed cannot be brought, so that no lie is proved
    assert found(company) == ([("worker-2", "state", 3)] if is_shown else [])
    assert company.lost == ([] if is_shown else ["worker-2"])
    assert dict(company.engine.holders) == {0: "owner", 1: "worker-1", 2: "owner"}
    assert company.weights_digest() == honest_digest(run, 5)


def test_a_snapshot_that_is_withheld_from_the_shadow_is_handed_on_by_the_owner(make_company, honest_digest):
    def withhold(outgoing, bulk):
        return [] if bulk.purpose == "snapshot" and outgoing.receiver != "owner" else [outgoing]

    run = run_with(IMPATIENT)
    company = make_company(run, {1: Actor(rewrite=only(Bulk, withhold))})

    company.run(4)

    assert [body["to"] for body in company.bodies("relayed")] == ["worker-2"]
    assert (company.lost, company.evicted) == ([], [])
    assert company.weights_digest() == honest_digest(run, 4)


def test_a_snapshot_that_was_not_asked_for_is_refused(make_company, honest_digest):
    def send_anew(outgoing, commit):
        early = Bulk(epoch=commit.epoch, step=commit.step, stage=1, purpose="snapshot", offset=0, total=8)
        return [type(outgoing)("worker-2", early, bytes(8)), outgoing] if commit.step == 4 else [outgoing]

    company = make_company(run_with(), {1: Actor(rewrite=only(Commit, send_anew))})

    company.run(7)

    assert [body["party"] for body in company.bodies("fault")] == ["worker-2"]
    assert (company.lost, company.evicted) == ([], [])
    assert company.weights_digest() == honest_digest(run_with(), 7)


def test_an_heir_that_begins_with_another_snapshot_than_it_signed_for_is_named(make_company):
    def falsify(outgoing, ready):
        if ready.epoch == 0 or "1" not in ready.states:
            return [outgoing]
        state = ready.states["1"].model_copy(update={"moments": "3" * 64})
        return [outgoing.with_fields({"states": {**ready.states, "1": state}})]

    pipeline = PipelineConfig(stages=4, spares=1, step_timeout_s=30.0)
    company = make_company(run_with(pipeline), {3: Actor(rewrite=only(Ready, falsify))})
    successor = company.engine.shadows[1]
    assert successor == "worker-3"
    company.run(4)

    company.kill("worker-1")
    company.run(2)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [(successor, "state")]


# --- weights that an auditor fetches ------------------------------------------------------------------


def answering_audits_with(change):
    def alter(outgoing, bulk):
        return change(outgoing, bulk) if bulk.purpose == "weights" else [outgoing]

    return Actor(rewrite=only(Bulk, alter))


@pytest.mark.parametrize(
    "change",
    [
        lambda outgoing, bulk: [],
        lambda outgoing, bulk: [type(outgoing)(outgoing.receiver, bulk, doubled(outgoing.payload))],
    ],
    ids=["withheld", "other"],
)
def test_a_stage_that_shows_its_auditor_no_weights_or_other_ones_is_replaced(make_company, honest_digest, change):
    run = run_with(IMPATIENT)
    company = audit_at(make_company(run, {1: answering_audits_with(change)}), (1, 4))

    company.run(6)

    assert (company.lost, company.evicted) == (["worker-1"], [])
    assert went_back(company) == [(3, 4)]
    assert company.weights_digest() == honest_digest(run, 6)


def test_weights_that_are_withheld_from_the_auditor_alone_are_handed_on(make_company, honest_digest):
    run = run_with(IMPATIENT)
    stingy = answering_audits_with(lambda outgoing, bulk: [outgoing] if outgoing.receiver == "owner" else [])
    company = audit_at(make_company(run, {1: stingy}), (1, 4))

    company.run(6)

    assert (company.lost, company.evicted) == ([], [])
    assert company.bodies("relayed")
    assert company.weights_digest() == honest_digest(run, 6)


def test_nobody_fetches_weights_before_the_stage_has_committed(make_company):
    told = []

    def note_commit(outgoing, commit):
        told.append(("commit", commit.step))
        return [outgoing]

    def note_fetch(outgoing, fetch):
        told.append(("fetch", fetch.step))
        return [outgoing]

    actors = {1: Actor(rewrite=only(Commit, note_commit)), 2: Actor(rewrite=only(FetchBulk, note_fetch))}
    company = audit_at(make_company(run_with(), actors), (1, 2))

    company.run(4)

    assert told == [("commit", 0), ("commit", 1), ("commit", 2), ("fetch", 2), ("commit", 3)]


def test_third_parties_audit_beside_shadows_that_keep_snapshots(make_company, honest_digest):
    run = tiny_run(5, guard=SNAPSHOT.model_copy(update={"third_party_audit_rate": 1.0}))
    company = audit_at(make_company(run, {1: lying_from(2)}))

    company.run(4)

    assert [(verdict.party, verdict.offence, verdict.accuser) for verdict in company.verdicts] == [
        ("worker-1", "message", "worker-3")
    ]
    assert company.weights_digest() == honest_digest(run, 4)


# --- parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"shadow": "snapshot", "keep_steps": 4}, "keep_steps = 4 with shadow = .snapshot."),
        ({"shadow": "gradient", "snapshot_every": 4}, "snapshot_every = 4 with shadow = .gradient."),
        ({"mode": "paper", "shadow": "snapshot"}, "mode = .paper. fixes shadow"),
        ({"shadow": "snapshot", "snapshot_every": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense_with_snapshots_are_refused(found, message):
    with pytest.raises(ValidationError, match=message):
        GuardConfig(**found)


def as_parts(tensors, sender):
    """A snapshot of step 3 in parts, as one party sends it."""
    sent = []
    about = FetchBulk(epoch=0, step=EVERY, stage=1, purpose="snapshot")
    bulk.send_bulk(lambda receiver, message, parts: sent.append((message, b"".join(parts))), "", about, tensors, EVERY)
    return [ReceivedMessage(sender, message, memoryview(payload), None) for message, payload in sent]


def test_what_the_owner_hands_on_is_not_mixed_with_late_parts_of_the_stage(model_cache, monkeypatch):
    monkeypatch.setattr(bulk, "PART_BYTES", 4096)
    run = run_with()
    plan = make_plan(run, open_model(run.model, model_cache, run.train.seed))
    said = []

    def post(receiver, message, parts):
        said.append(message)

    roles = Roles("worker-2", plan, post, lambda copy, held: copy)
    roles.epoch, roles.assignment = 0, Assignment({1: "worker-1"}, {1: "worker-2"})
    kept = roles.kept[1] = KeptStage(plan, 1)
    kept.load({name: torch.zeros(tensor.shape) for name, tensor in kept.state().items()}, 0)
    kept.verified = EVERY
    snapshots = SnapshotReceiver(
        PartyContext("worker-2", plan, roles, post, Statements("run", lambda name: None), PhaseTimer())
    )
    right = {name: torch.ones_like(tensor) for name, tensor in kept.moving(0).items()}
    false = {name: 2 * tensor for name, tensor in right.items()}
    owners, late = as_parts(right, "owner"), as_parts(false, "worker-1")

    snapshots.take(late[0], late[0].message)
    snapshots.take(owners[0], owners[0].message)
    for part in late:
        with pytest.raises(FrameError, match="expected those of"):
            snapshots.take(part, part.message)
    for part in owners[1:]:
        snapshots.take(part, part.message)

    (held,) = said
    assert held.state == state_digest(right, tensors_digest({}), EVERY)


def test_a_copy_goes_back_to_its_snapshot_and_nowhere_else(model_cache):
    run = run_with()
    plan = make_plan(run, open_model(run.model, model_cache, run.train.seed))
    copy = StageCopy.empty(plan, 1)
    for tensor in copy.state().values():
        tensor.fill_(0.5)
    gradients = {name: torch.ones_like(parameter) for name, parameter in copy.module.trainable().items()}
    digests = {}
    for step in range(5):
        digests[step] = copy.digest()
        copy.apply(step, gradients, 1.0)

    with pytest.raises(StaleReplicaError, match="asked for the state of step 2; kept is that of 3"):
        copy.rewind(2)
    copy.rewind(3)

    assert copy.digest() == digests[3]
    copy.apply(3, gradients, 1.0)
    assert copy.digest() == digests[4]
