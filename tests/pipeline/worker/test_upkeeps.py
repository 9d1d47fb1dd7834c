"""Shadows that are kept fresh in other ways than by the weight gradient: what each one finds, and what it cannot."""

import contextlib
import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import EvidenceError, NoHolderError, TrainingError
from phalanx.lab.attacks import actor
from phalanx.models import LoraConfig, open_model
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig, StageCopy
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import AuditReport, Bulk, Commit, WeightsHeld
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.verify.sent_state import SentState
from phalanx.pipeline.worker.shadowing import ShadowedStages
from phalanx.testing import Actor, only, tampering, tiny_run
from phalanx.train.setup.layout import make_plan


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


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"audit_rate": 1.0},
        {"step_audit_rate": 1.0},
        {"owner_audit_rate": 1.0},
    ],
)
def test_shadows_that_follow_weights_change_no_bit(make_company, honest_digest, changes):
    run = tiny_run(guard=UPDATE.model_copy(update=changes))
    company = make_company(run)

    company.run(3)

    assert company.weights_digest() == honest_digest(run, 3)
    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])


def doubled(payload):
    return (2 * torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()


def ends_undisturbed(company, honest_digest, num_steps):
    """The company has lost the holder of a stage, falls back to its checkpoint and still ends with the right bits."""
    with pytest.raises(NoHolderError, match="no optimizer state to take over with"):
        company.run(num_steps)
    step = company.fall_back()
    company.run(num_steps - step)
    return company.weights_digest() == honest_digest(company.run_config, num_steps)


def saved_after(company, num_steps):
    company.run(num_steps)
    company.save()
    return company


def sending_other_weights(from_step):
    """What a stage uses and signs is honest; what it sends its shadow is not."""

    def alter(outgoing, bulk):
        spoilt = bulk.purpose == "update" and bulk.step >= from_step
        return [type(outgoing)(outgoing.receiver, bulk, doubled(outgoing.payload))] if spoilt else [outgoing]

    return Actor(rewrite=only(Bulk, alter))


def test_a_stage_that_sends_other_weights_than_it_signs_is_convicted_by_its_own_signatures(make_company, honest_digest):
    company = saved_after(make_company(tiny_run(guard=UPDATE), {1: sending_other_weights(4)}), 2)

    assert ends_undisturbed(company, honest_digest, 5)
    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.step) == ("worker-1", "state", 4)
    facts = explain_evidence(company.run_dir / str(verdict.evidence))
    assert facts["conclusion"] == "holds: worker-1 sent other weights than those whose digest it signed"
    assert facts["rests on the owner's word"] == "nothing"


@pytest.mark.slow
def test_evidence_of_sent_weights_does_not_hold_against_who_sent_the_right_ones(make_company, tmp_path):
    company = saved_after(make_company(tiny_run(guard=UPDATE), {1: sending_other_weights(2)}), 1)
    with pytest.raises(NoHolderError):
        company.run(2)
    path = company.run_dir / str(company.verdicts[0].evidence)
    record, beside = json.loads(path.read_text()), path.with_suffix(".safetensors")
    weights = {name: value / 2 for name, value in load_file(beside).items()}
    save_file(weights, beside)
    record["tensors"]["sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
    path.write_text(json.dumps(record))

    with pytest.raises(EvidenceError, match="its weights are not those that worker-1 sent"):
        explain_evidence(path)


@pytest.mark.slow
def test_where_weights_are_not_compared_such_a_stage_gets_its_innocent_shadow_replaced(make_company, monkeypatch):
    async def acquit(self, stage, signed, taken):
        return None

    monkeypatch.setattr(SentState, "weigh", acquit)
    run = tiny_run(guard=UPDATE.model_copy(update={"audit_rate": 1.0}))
    company = saved_after(make_company(run, {1: sending_other_weights(2)}), 1)

    with pytest.raises(NoHolderError):
        company.run(2)

    assert (company.evicted, company.lost) == ([], ["worker-2"])


def test_a_stage_that_computes_with_other_weights_than_it_sends_is_found_by_audits(make_company, honest_digest):
    def tamper(direction, step, microbatch, tensor):
        return tensor * 1.001 if step >= 3 else tensor

    run = tiny_run(guard=UPDATE.model_copy(update={"audit_rate": 1.0}))
    company = saved_after(make_company(run, {2: Actor(tampering(tamper))}), 2)

    assert ends_undisturbed(company, honest_digest, 5)
    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [("worker-2", "message", 3)]


@pytest.mark.parametrize(
    "kind",
    ["wrong_learning_rate", *(pytest.param(one, marks=pytest.mark.slow) for one in ("skipped_update", "weight_drift"))],
)
def test_the_owners_audit_names_a_stage_that_bends_the_law_of_the_update(make_company, honest_digest, kind):
    seeing = tiny_run(guard=UPDATE.model_copy(update={"owner_audit_rate": 1.0}))
    company = saved_after(make_company(seeing, {1: actor(AttackConfig(kind=kind, from_step=3), "worker-1")}), 2)

    assert ends_undisturbed(company, honest_digest, 5)
    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [("worker-1", "state", 3)]


@pytest.mark.slow
def test_without_the_owners_audits_a_wrong_learning_rate_is_never_seen(make_company, honest_digest):
    # only what a stage computes with its weights is checked, not how it came by them: sharp edge 3
    unclipped = OptimizerConfig(lr=1e-2, warmup_steps=2, clip_norm=None)
    run = tiny_run(guard=UPDATE.model_copy(update={"audit_rate": 1.0}), optimizer=unclipped)
    liar = actor(AttackConfig(kind="wrong_learning_rate", from_step=1), "worker-1")
    company = make_company(run, {1: liar})

    company.run(4)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run, 4)


@pytest.mark.parametrize("norm", [1e-9, pytest.param(1e6, marks=pytest.mark.slow), None])
def test_a_wrong_norm_is_found_when_somebody_redoes_the_step(make_company, honest_digest, norm):
    # one that is not finite is looked into at once, for the run could not go on with it
    rates = {} if norm is None else {"owner_audit_rate": 1.0}
    run = tiny_run(guard=UPDATE.model_copy(update=rates))

    def lie(outgoing, commit):
        return [outgoing.with_fields({"norm_squared": norm})] if commit.step == 3 else [outgoing]

    company = saved_after(make_company(run, {1: Actor(rewrite=only(Commit, lie))}), 2)

    assert ends_undisturbed(company, honest_digest, 5)
    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-1", "gradient")]


@pytest.mark.parametrize("shadow", ["update", "lockstep"])
def test_an_audit_of_the_whole_step_finds_a_wrong_norm_in_the_stage_and_not_in_its_auditor(make_company, shadow):
    def lie(outgoing, commit):
        return [outgoing.with_fields({"norm_squared": 1e-9})] if commit.step == 1 else [outgoing]

    run = tiny_run(guard=GuardConfig(shadow=shadow, step_audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, {1: Actor(rewrite=only(Commit, lie))})

    with contextlib.suppress(NoHolderError):
        company.run(2)

    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-1", "gradient")]


def lying_report(outgoing, report):
    return (
        [outgoing.with_fields({"digests": {**report.digests, "forward": "3" * 64}})] if report.step == 1 else [outgoing]
    )


def lying_about_weights(outgoing, held):
    state = held.state.model_copy(update={"weights": "3" * 128})
    return [outgoing.with_fields({"state": state})] if held.step == 2 else [outgoing]


@pytest.mark.parametrize(
    ("rewrite", "offences"),
    [(only(AuditReport, lying_report), ["accusation"]), (only(WeightsHeld, lying_about_weights), [])],
    ids=["convicted", "replaced"],
)
def test_a_shadow_that_lies_goes_and_the_stage_that_it_accused_goes_on(make_company, honest_digest, rewrite, offences):
    # worker 3 is a spare: it shadows stage 1 and holds nothing, so nothing is lost with it
    pipeline = PipelineConfig(stages=3, spares=1, step_timeout_s=30.0)
    run = tiny_run(guard=UPDATE.model_copy(update={"audit_rate": 1.0}), pipeline=pipeline)
    company = make_company(run, {2: Actor(rewrite=rewrite)})
    assert dict(company.engine.shadows) == {1: "worker-2"}

    company.run(4)

    # weights of the digest that it signed do not exist, and who does not bring them is replaced
    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-2", offence) for offence in offences]
    assert company.evicted + company.lost == ["worker-2"]
    assert dict(company.engine.holders) == {0: "owner", 1: "worker-1", 2: "owner"}
    assert company.weights_digest() == honest_digest(run, 4)


def test_weights_that_are_withheld_are_handed_on_by_the_owner(make_company, honest_digest):
    def withhold(outgoing, bulk):
        is_the_one = (bulk.purpose, bulk.step) == ("update", 2) and outgoing.receiver != "owner"
        return [] if is_the_one else [outgoing]

    run = tiny_run(guard=UPDATE, pipeline=PipelineConfig(stages=4, step_timeout_s=30.0, patience_s=0.3))
    company = make_company(run, {1: Actor(rewrite=only(Bulk, withhold))})

    company.run(3)

    assert {body["what"] for body in company.bodies("relayed")} == {"fetch_bulk"}
    assert (company.lost, company.evicted) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


def hurrying(run, cache):
    """Before it commits to step 1, the stage sends what its shadow should audit this step with: zeros."""
    copy = StageCopy.empty(make_plan(run, open_model(run.model, cache, run.train.seed)), 1, has_moments=False)
    size = sum(tensor.nbytes for tensor in copy.trained().values())

    def hurry(outgoing, commit):
        if (commit.stage, commit.step) != (1, 1):
            return [outgoing]
        early = Bulk(epoch=commit.epoch, step=2, stage=1, purpose="update", offset=0, total=size)
        return [type(outgoing)("worker-2", early, bytes(size)), outgoing]

    return Actor(rewrite=only(Commit, hurry))


def test_weights_that_come_before_their_step_is_verified_do_not_spoil_its_audit(make_company, model_cache):
    run = tiny_run(guard=UPDATE.model_copy(update={"audit_rate": 1.0}))
    company = make_company(run, {1: hurrying(run, model_cache)})

    with pytest.raises(NoHolderError):
        company.run(3)

    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [("worker-1", "state", 2)]


@pytest.mark.slow
def test_taken_at_once_such_weights_would_cost_the_run_its_honest_shadow(make_company, model_cache, monkeypatch):
    take = ShadowedStages.take_update

    def take_at_once(self, received, message):
        self._shadows[message.stage].pending_apply = 1.0
        take(self, received, message)

    monkeypatch.setattr(ShadowedStages, "is_early", lambda self, message: False)
    monkeypatch.setattr(ShadowedStages, "take_update", take_at_once)
    run = tiny_run(guard=UPDATE.model_copy(update={"audit_rate": 1.0}))
    company = make_company(run, {1: hurrying(run, model_cache)})

    with pytest.raises(NoHolderError):
        company.run(3)

    assert company.lost == ["worker-2"]


def sending_an_unasked_gradient(run, cache):
    """Before it commits to a weight gradient of zeros in step 1, the stage sends its shadow the same."""
    copy = StageCopy.empty(make_plan(run, open_model(run.model, cache, run.train.seed)), 1, has_moments=False)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in copy.module.trainable().items()}
    size = sum(tensor.nbytes for tensor in zeros.values())
    said = {"gradient": transfer_digest(zeros), "norm_squared": 0.0}

    def alter(outgoing, commit):
        if (commit.stage, commit.step) != (1, 1):
            return [outgoing]
        bulk = Bulk(epoch=commit.epoch, step=1, stage=1, purpose="gradient", offset=0, total=size)
        return [type(outgoing)("worker-2", bulk, bytes(size)), outgoing.with_fields(said)]

    return Actor(rewrite=only(Commit, alter))


def test_a_shadow_in_lockstep_vouches_for_what_it_computed_and_not_for_what_it_was_sent(
    make_company, model_cache, honest_digest
):
    run = tiny_run(guard=GuardConfig(shadow="lockstep", owner_audit_rate=0.0))
    company = make_company(run, {1: sending_an_unasked_gradient(run, model_cache)})

    company.run(3)

    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [("worker-1", "gradient", 1)]
    assert company.weights_digest() == honest_digest(run, 3)


def test_weights_that_have_arrived_are_progress(make_company, monkeypatch):
    moved = []
    company = make_company(tiny_run(guard=UPDATE))
    coordinator = company.engine._loop.coordinator
    handle = coordinator.handle

    def watch(received):
        before = coordinator.progress
        taken = handle(received)
        if isinstance(received.message, WeightsHeld):
            moved.append(coordinator.progress != before)
        return taken

    monkeypatch.setattr(coordinator, "handle", watch)

    company.run(2)
    company.weights_digest()

    assert moved == [True] * 4


def test_a_shadow_that_follows_keeps_weights_and_nothing_else(model_cache):
    plan_run = tiny_run(guard=UPDATE)
    source = open_model(plan_run.model, model_cache, 1)
    plan = make_plan(plan_run, source)

    shadow, successor = StageCopy.empty(plan, 1, has_moments=False), StageCopy.empty(plan, 1)

    assert sum(t.nbytes for t in successor.state().values()) == 3 * sum(t.nbytes for t in shadow.state().values())
    with pytest.raises(TrainingError, match="no moments"):
        shadow.apply(0, {name: torch.zeros_like(p) for name, p in shadow.module.trainable().items()}, 1.0)


@pytest.mark.parametrize("shadow", [pytest.param("gradient", marks=pytest.mark.slow), "update"])
def test_both_holders_of_a_stage_that_are_lost_at_once_cost_the_steps_since_the_checkpoint(
    make_company, honest_digest, shadow
):
    run = tiny_run(guard=GuardConfig(shadow=shadow, step_audit_rate=0.0, owner_audit_rate=0.0))
    company = saved_after(make_company(run), 2)
    company.run(2)
    company.kill("worker-1")
    company.kill("worker-2")

    with pytest.raises(NoHolderError):
        company.run(1)
        company.weights_digest()

    assert company.engine.next_step == 4
    assert company.fall_back() == 2
    assert set(company.engine.holders.values()) == {"owner"}
    company.run(3)
    assert (sorted(company.lost), company.verdicts) == (["worker-1", "worker-2"], [])
    assert company.weights_digest() == honest_digest(run, 5)


@pytest.mark.slow
def test_two_liars_that_are_found_one_after_the_other_are_both_excluded(make_company, honest_digest):
    run = tiny_run(guard=UPDATE.model_copy(update={"owner_audit_rate": 1.0}))
    liars = {n: actor(AttackConfig(kind="skipped_update", stages=(n,), from_step=3), f"worker-{n}") for n in (1, 2)}
    company = saved_after(make_company(run, liars), 2)

    step = 2
    while company.engine.next_step < 5 or len(company.evicted) < len(liars):
        try:
            company.run(5 - step)
            company.weights_digest()
        except NoHolderError:
            step = company.fall_back()

    assert sorted(company.evicted) == ["worker-1", "worker-2"]
    assert {v.offence for v in company.verdicts} == {"state"}
    assert company.weights_digest() == honest_digest(run, 5)
