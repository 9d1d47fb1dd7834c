"""Shadows that are sent a snapshot now and then, to which the whole company goes back when roles change."""

import pytest
import torch
from pydantic import ValidationError

from phalanx.attacks import actor
from phalanx.errors import FrameError, StaleReplicaError
from phalanx.models import LoraConfig, open_model
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig, StageCopy, bulk, explain_evidence
from phalanx.pipeline.bulk import tensors_digest
from phalanx.pipeline.desk import Desk, Received
from phalanx.pipeline.keeping import Keeping
from phalanx.pipeline.kept import KeptStage
from phalanx.pipeline.messages import Bulk, Commit, FetchBulk, Ready, WeightsHeld
from phalanx.pipeline.recovery import Assignment
from phalanx.pipeline.roles import Roles
from phalanx.pipeline.stage_copy import state_digest
from phalanx.telemetry import PhaseTimer
from phalanx.testing import Actor, only, tampering, tiny_run
from phalanx.train.layout import make_plan

EVERY = 3
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}
SNAPSHOT = GuardConfig(shadow="snapshot", snapshot_every=EVERY, **NO_COIN)
SPARE = PipelineConfig(stages=3, spares=1, step_timeout_s=30.0)
ALONE = PipelineConfig(stages=3, step_timeout_s=30.0)
IMPATIENT = PipelineConfig(stages=4, step_timeout_s=60.0, patience_s=0.4)


def run_with(pipeline=None, **changes):
    return tiny_run(guard=SNAPSHOT.model_copy(update=changes), pipeline=pipeline)


def audit_at(company, *places):
    """Let the coin fall on these (stage, step) and no others."""
    company.draw.all_messages = lambda *, step, epoch, stage: (stage, step) in places
    return company


def went_back(company):
    return [(body["to"], body["step"]) for body in company.bodies("rolled_back")]


def found(company):
    return [(verdict.party, verdict.offence, verdict.step) for verdict in company.verdicts]


def lying_from(step, factor=1.5):
    return Actor(tampering(lambda direction, at, microbatch, tensor: factor * tensor if at >= step else tensor))


def doubled(payload):
    return (2 * torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()


# --- honest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "changes"),
    [
        (None, {}),
        (None, {"audit_rate": 1.0}),
        (None, {"step_audit_rate": 1.0, "owner_audit_rate": 1.0}),
        (SPARE, {"audit_rate": 1.0}),
        (ALONE, {"audit_rate": 0.5, "step_audit_rate": 0.5}),
    ],
)
def test_snapshots_change_no_bit_whoever_keeps_them(make_company, honest_digest, pipeline, changes):
    run = run_with(pipeline, **changes)
    company = make_company(run)

    company.run(7)

    assert company.weights_digest() == honest_digest(run, 7)
    assert (company.verdicts, company.lost, company.bodies("fault"), company.bodies("refused")) == ([], [], [], [])


def test_the_weights_are_those_of_the_gradient_upkeep(make_company):
    digests = set()
    for guard in (SNAPSHOT, GuardConfig(**NO_COIN)):
        company = make_company(tiny_run(guard=guard))
        company.run(7)
        digests.add(company.weights_digest())

    assert len(digests) == 1


def test_a_stage_sends_its_state_every_so_many_steps_and_weights_in_audited_ones_alone(make_company):
    sent = []

    def note(letter, bulk):
        if bulk.stage == 1 and bulk.offset == 0:
            sent.append((bulk.purpose, bulk.step))
        return [letter]

    company = audit_at(make_company(run_with(), {1: Actor(rewrite=only(Bulk, note))}), (1, 1), (1, 4))

    results = company.run(8)

    assert sent == [("weights", 1), ("snapshot", 3), ("weights", 4), ("snapshot", 6)]
    assert [result.num_audits for result in results] == [0, 4, 0, 0, 4, 0, 0, 0]


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
    [(None, 1, 0), (None, 4, 3), (None, 8, 6), (SPARE, 5, 3), (SPARE, 2, 0), (ALONE, 5, 3)],
)
def test_a_holder_that_dies_between_snapshots_costs_the_steps_since_the_last_one(
    make_company, honest_digest, pipeline, dies_before, back_to
):
    run = run_with(pipeline)
    company = make_company(run)
    company.run(dies_before)

    company.kill("worker-1")
    results = company.run(9 - dies_before)

    assert went_back(company) == [(back_to, dies_before)]
    assert sum(result.steps_redone for result in results) == dies_before - back_to
    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert company.weights_digest() == honest_digest(run, 9)


def test_a_holder_that_dies_before_its_snapshot_is_handed_over_is_replaced_from_the_one_before(
    make_company, honest_digest
):
    def die(letter, bulk):
        return [] if bulk.purpose == "snapshot" and bulk.step == 6 else [letter]

    run = run_with(IMPATIENT)
    company = make_company(run, {1: Actor(rewrite=only(Bulk, die))})

    company.run(8)

    # what is withheld from the shadow is withheld from the owner too: it is replaced and not blamed
    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert went_back(company) == [(3, 6)]
    assert company.weights_digest() == honest_digest(run, 8)


def test_a_loss_right_after_all_have_the_snapshot_costs_no_step(make_company, honest_digest):
    company = make_company(run_with())
    company.run(6)
    # waits until the states after the sixth update are agreed on, snapshots included
    company.weights_digest()

    company.kill("worker-1")
    results = company.run(2)

    assert went_back(company) == []
    assert [result.steps_redone for result in results] == [0, 0]
    assert company.weights_digest() == honest_digest(run_with(), 8)


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


def test_a_run_of_one_step_between_snapshots_redoes_the_interrupted_step_alone(make_company, honest_digest):
    run = run_with(snapshot_every=1)
    company = make_company(run)
    company.run(3)

    company.kill("worker-2")
    results = company.run(2)

    # the snapshot of step 3 is everybody's only when step 3 is applied
    assert [result.steps_redone for result in results] == [1, 0]
    assert company.weights_digest() == honest_digest(run, 5)


# --- liars ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_a_liar_is_named_when_the_coin_falls_and_what_it_did_since_the_snapshot_is_undone(
    make_company, honest_digest, stage
):
    company = audit_at(make_company(run_with(), {stage: lying_from(4)}), (stage, 5))

    results = company.run(8)

    assert found(company) == [(f"worker-{stage}", "message", 5)]
    assert went_back(company) == [(3, 5)]
    assert sum(result.steps_redone for result in results) == 2
    assert company.weights_digest() == honest_digest(run_with(), 8)


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


@pytest.mark.parametrize("kind", ["wrong_learning_rate", "skipped_update", "weight_drift"])
def test_the_owner_names_a_stage_that_bends_the_update_and_the_run_goes_back(make_company, honest_digest, kind):
    run = run_with(owner_audit_rate=1.0)
    company = make_company(run, {1: actor(AttackConfig(kind=kind, from_step=4), "worker-1")})

    company.run(7)

    assert found(company) == [("worker-1", "state", 4)]
    assert went_back(company) == [(3, 4)]
    assert company.weights_digest() == honest_digest(run, 7)


# --- what is handed over ----------------------------------------------------------------------------


def sending_another_snapshot(step):
    """What a stage uses and signs is honest; the snapshot that it sends its shadow is not."""

    def alter(letter, bulk):
        spoilt = bulk.purpose == "snapshot" and bulk.step == step
        return [type(letter)(letter.receiver, bulk, doubled(letter.payload))] if spoilt else [letter]

    return Actor(rewrite=only(Bulk, alter))


@pytest.mark.parametrize("pipeline", [None, ALONE], ids=["worker", "owner"])
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
    def alter(letter, bulk):
        if bulk.purpose != "snapshot":
            return [letter]
        # names are sent in order: exp_avg/... comes first
        payload = bytes(4) + letter.payload[4:]
        return [type(letter)(letter.receiver, bulk, payload)]

    company = make_company(run_with(), {1: Actor(rewrite=only(Bulk, alter))})

    company.run(4)

    assert found(company) == [("worker-1", "state", 3)]
    assert company.weights_digest() == honest_digest(run_with(), 4)


@pytest.mark.parametrize("guard", [SNAPSHOT, GuardConfig(**NO_COIN)], ids=["snapshot", "gradient"])
def test_a_part_that_does_not_fit_among_others_frames_no_shadow(make_company, honest_digest, monkeypatch, guard):
    # a state in many parts; with one of them alone the first would begin the transfer anew
    monkeypatch.setattr(bulk, "PART_BYTES", 4096)
    purpose = "snapshot" if guard.keeps_snapshots else "gradient"

    def alter(letter, message):
        if (message.purpose, message.step) != (purpose, 3):
            return [letter]
        if message.offset == 0:
            return [letter, letter.saying({"offset": 5})]
        # with a gradient it is enough that the shadow shows one part more than was committed to
        return [type(letter)(letter.receiver, message, doubled(letter.payload))] if guard is SNAPSHOT else [letter]

    run = tiny_run(guard=guard)
    company = make_company(run, {1: Actor(rewrite=only(Bulk, alter))})

    company.run(5)

    expected = [("worker-1", "state", 3)] if guard is SNAPSHOT else []
    assert found(company) == expected
    assert company.weights_digest() == honest_digest(run, 5)


@pytest.mark.parametrize("field", ["weights", "moments", "frozen"])
def test_a_shadow_that_lies_about_the_snapshot_that_it_was_sent_is_named(make_company, honest_digest, field):
    def lie(letter, held):
        state = held.state
        changes = {
            "weights": {"weights": state.weights[:-64] + "3" * 64},
            "moments": {"moments": "3" * 64},
            "frozen": {"weights": "3" * 64 + state.weights[-64:]},
        }
        return [letter.saying({"state": state.model_copy(update=changes[field])})]

    run = run_with(SPARE)
    company = make_company(run, {2: Actor(rewrite=only(WeightsHeld, lie))})
    assert dict(company.engine.shadows) == {1: "worker-2"}

    company.run(5)

    assert found(company) == [("worker-2", "state", 3)]
    assert dict(company.engine.holders) == {0: "owner", 1: "worker-1", 2: "owner"}
    assert company.weights_digest() == honest_digest(run, 5)


def test_a_snapshot_that_is_withheld_from_the_shadow_is_handed_on_by_the_owner(make_company, honest_digest):
    def withhold(letter, bulk):
        return [] if bulk.purpose == "snapshot" and letter.receiver != "owner" else [letter]

    run = run_with(IMPATIENT)
    company = make_company(run, {1: Actor(rewrite=only(Bulk, withhold))})

    company.run(4)

    assert [body["to"] for body in company.bodies("relayed")] == ["worker-2"]
    assert (company.lost, company.evicted) == ([], [])
    assert company.weights_digest() == honest_digest(run, 4)


def test_a_snapshot_that_was_not_asked_for_is_refused(make_company, honest_digest):
    def send_anew(letter, commit):
        early = Bulk(epoch=commit.epoch, step=commit.step, stage=1, purpose="snapshot", offset=0, total=8)
        return [type(letter)("worker-2", early, bytes(8)), letter] if commit.step == 4 else [letter]

    company = make_company(run_with(), {1: Actor(rewrite=only(Commit, send_anew))})

    company.run(7)

    assert [body["party"] for body in company.bodies("fault")] == ["worker-2"]
    assert (company.lost, company.evicted) == ([], [])
    assert company.weights_digest() == honest_digest(run_with(), 7)


def test_an_heir_that_begins_with_another_snapshot_than_it_signed_for_is_named(make_company):
    def falsify(letter, ready):
        if ready.epoch == 0 or "1" not in ready.states:
            return [letter]
        state = ready.states["1"].model_copy(update={"moments": "3" * 64})
        return [letter.saying({"states": {**ready.states, "1": state}})]

    pipeline = PipelineConfig(stages=4, spares=1, step_timeout_s=30.0)
    company = make_company(run_with(pipeline), {3: Actor(rewrite=only(Ready, falsify))})
    heir = company.engine.shadows[1]
    assert heir == "worker-3"
    company.run(4)

    company.kill("worker-1")
    company.run(2)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [(heir, "state")]


# --- weights that an auditor fetches ------------------------------------------------------------------


def answering_audits_with(change):
    def alter(letter, bulk):
        return change(letter, bulk) if bulk.purpose == "weights" else [letter]

    return Actor(rewrite=only(Bulk, alter))


@pytest.mark.parametrize(
    "change",
    [lambda letter, bulk: [], lambda letter, bulk: [type(letter)(letter.receiver, bulk, doubled(letter.payload))]],
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
    stingy = answering_audits_with(lambda letter, bulk: [letter] if letter.receiver == "owner" else [])
    company = audit_at(make_company(run, {1: stingy}), (1, 4))

    company.run(6)

    assert (company.lost, company.evicted) == ([], [])
    assert company.bodies("relayed")
    assert company.weights_digest() == honest_digest(run, 6)


def test_nobody_fetches_weights_before_the_stage_has_committed(make_company):
    told = []

    def note_commit(letter, commit):
        told.append(("commit", commit.step))
        return [letter]

    def note_fetch(letter, fetch):
        told.append(("fetch", fetch.step))
        return [letter]

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
    return [Received(sender, message, memoryview(payload), None) for message, payload in sent]


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
    keeping = Keeping(Desk("worker-2", plan, roles, post, lambda name: None, PhaseTimer()))
    right = {name: torch.ones_like(tensor) for name, tensor in kept.moving(0).items()}
    false = {name: 2 * tensor for name, tensor in right.items()}
    owners, late = as_parts(right, "owner"), as_parts(false, "worker-1")

    keeping.take(late[0], late[0].message)
    keeping.take(owners[0], owners[0].message)
    for part in late:
        with pytest.raises(FrameError, match="expected those of"):
            keeping.take(part, part.message)
    for part in owners[1:]:
        keeping.take(part, part.message)

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
