"""Single rows are hidden in a verified pipeline: every stage clips them, and adds noise that auditors compute again."""

import hashlib
import json
import math
from copy import copy as shallow

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config

from phalanx.data import IGNORE
from phalanx.errors import EvidenceError
from phalanx.models import LoraConfig
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.pipeline import GuardConfig, PipelineConfig, RowPrivacy, StageRunner
from phalanx.pipeline.evidence.explain import UNPROVED, explain_evidence
from phalanx.pipeline.stage.stage_copy import noisy_mean
from phalanx.redteam.epsilon_bound import bound_from_many_runs
from phalanx.security.privacy import NoiseSecret, PoissonGaussian, noise_seed
from phalanx.testing import Actor, tiny_run
from phalanx.testing import company as company_module
from phalanx.testing.tiny import random_batch

LOCKSTEP = GuardConfig(shadow="lockstep", step_audit_rate=0.0, owner_audit_rate=0.0)
UNGUARDED = GuardConfig(mode="off")
PRIVACY = RowPrivacy(clip_norm=0.5, noise_multiplier=1.0, mean_rows=4)
ROWS = 6


def secret_of(byte):
    return lambda: NoiseSecret(lambda size: byte * size)


@pytest.fixture
def known_noise(monkeypatch):
    """The secret of every company of the test; `key_of` is what its owner gives out."""
    made = secret_of(b"k")
    monkeypatch.setattr("phalanx.pipeline.owner.context.NoiseSecret", made)
    return made()


def private_run(guard=LOCKSTEP, adapter=None, stages=4, spares=0, **optimizer):
    settings = {"lr": 1e-2, "warmup_steps": 0, "clip_norm": None, "weight_decay": 0.0, **optimizer}
    pipeline = PipelineConfig(stages=stages, spares=spares, step_timeout_s=30.0)
    run = tiny_run(guard=guard, adapter=adapter, pipeline=pipeline, optimizer=OptimizerConfig(**settings))
    architecture = {**run.model.architecture, "tie_word_embeddings": False}
    model = run.model.model_copy(update={"architecture": architecture})
    train = run.train.model_copy(update={"batch_size": ROWS, "microbatches": ROWS})
    return run.model_copy(update={"model": model, "train": train})


@pytest.fixture
def start(make_company, monkeypatch):
    """Start a company with stages that hide rows."""
    plain = company_module.make_plan

    def make(run=None, actors=None, privacy=PRIVACY):
        monkeypatch.setattr(
            company_module,
            "make_plan",
            lambda found, source: plain(found, source).model_copy(update={"privacy": privacy}),
        )
        return make_company(run or private_run(), actors)

    return make


def weights_of(company):
    return [
        {name: tensor.detach().clone() for name, tensor in copy.module.all_parameters().items()}
        for copy in company.engine.fetch_stages("weights")
    ]


def whole_model(company, stages):
    model = AutoModelForCausalLM.from_config(GPT2Config(**company.plan.hub_config), attn_implementation="eager")
    known = {name: tensor for stage in stages for name, tensor in stage.items()}
    missing, unknown = model.load_state_dict(known, strict=False)
    assert not unknown
    assert all("attn.bias" in name or "masked_bias" in name for name in missing)
    return model.eval()


def row_gradients(model, ids, labels):
    """Of the mean loss of one row over its own targets, by plain autograd."""
    model.zero_grad()
    loss = functional.cross_entropy(model(ids[None]).logits[0], labels, ignore_index=IGNORE, reduction="sum")
    (loss / max(1, int((labels != IGNORE).sum()))).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def clipped_sum(model, stages, batch, bound):
    """Each row scaled down in each stage by itself, then added up."""
    total = [{name: torch.zeros_like(tensor) for name, tensor in stage.items()} for stage in stages]
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        found = row_gradients(model, ids, labels)
        for stage in total:
            norm = math.sqrt(sum(float(found[name].double().norm()) ** 2 for name in stage))
            for name, place in stage.items():
                place.add_(found[name], alpha=min(1.0, bound / (norm + 1e-6)))
    return total


def one_process(company, secret, num_steps):
    """The same training without stages, parties or guard."""
    run, stages = company.run_config, weights_of(company)
    model = whole_model(company, stages)
    settings = run.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    norms = []
    for step in range(num_steps):
        batch, squares = random_batch(run, 64, step), 0.0
        total = clipped_sum(model, stages, batch, company.plan.row_clip)
        for stage, gradients in enumerate(total):
            privacy, key = company.plan.privacy, secret.key_of(0, stage)
            for name, gradient in noisy_mean(gradients, privacy, step, key).items():
                dict(model.named_parameters())[name].grad = gradient
                squares += float(gradient.double().norm()) ** 2
        norms.append(math.sqrt(squares))
        optimizer.param_groups[0]["lr"] = learning_rate(run.optimizer, step, run.train.steps)
        optimizer.step()
    return dict(model.named_parameters()), norms


@pytest.mark.quick_cases("lockstep")
@pytest.mark.parametrize("guard", [LOCKSTEP, UNGUARDED], ids=["lockstep", "unguarded"])
def test_stages_come_to_what_one_process_does_with_the_same_groups_and_noise(start, known_noise, guard):
    company = start(private_run(guard))
    wanted, norms = one_process(company, known_noise, 3)

    results = company.run(3)

    assert [one.gradient_norm for one in results] == pytest.approx(norms, rel=1e-6)
    assert not company.verdicts
    for stage in weights_of(company):
        for name, tensor in stage.items():
            assert torch.allclose(tensor, wanted[name], atol=1e-6, rtol=0), name


def test_the_same_secret_gives_the_same_bits_and_another_one_others(start, monkeypatch):
    digests = []
    for byte in (b"k", b"k", b"l"):
        monkeypatch.setattr("phalanx.pipeline.owner.context.NoiseSecret", secret_of(byte))
        company = start()
        company.run(2)
        digests.append(company.weights_digest())

    assert digests[0] == digests[1] != digests[2]


def test_an_adapter_is_hidden_too_and_what_is_frozen_does_not_move(start, known_noise):
    company = start(private_run(adapter=LoraConfig(rank=2)))
    before = weights_of(company)

    company.run(2)

    moved = {
        name
        for old, new in zip(before, weights_of(company), strict=True)
        for name in old
        if not torch.equal(old[name], new[name])
    }
    assert moved
    assert all("lora" in name for name in moved)
    assert not company.verdicts


def test_each_stage_commits_to_its_key_in_the_log_and_nobody_else_is_told_of_it(start):
    company = start()
    company.run(1)

    (said,) = company.event_bodies("noise_committed")
    assert said["epoch"] == 0
    assert set(said["keys"]) == {"0", "1", "2", "3"}
    assert len(set(said["keys"].values())) == 4


# --- liars ------------------------------------------------------------------------------------------------------------


def bare_sum(copy):
    return {name: gradient / copy.plan.privacy.mean_rows for name, gradient in copy.runner.take_gradients().items()}


def without_noise(copy, held):
    """Commits to its sum as it is, and audits honestly."""
    return without_noise_anywhere(copy, held) if held else copy


def without_noise_anywhere(copy, held):
    mine = shallow(copy)
    mine.weight_gradient = lambda step, key: bare_sum(copy)
    return mine


def with_noise_of_its_own(copy, held):
    """Noise of the right size, which no auditor can compute again."""
    mine = shallow(copy)
    if held:
        mine.weight_gradient = lambda step, key: noisy_mean(
            copy.runner.take_gradients(), copy.plan.privacy, step, b"o" * 32
        )
    return mine


def unclipped(copy, held):
    """Adds rows as they are."""
    mine, plan = shallow(copy), copy.plan
    if held:
        mine.runner = StageRunner(
            copy.module, copy.spec, seed=plan.seed, precision=plan.precision, device=plan.device, row_clip=1e9
        )
    return mine


LIARS = {"no noise": without_noise, "noise of its own": with_noise_of_its_own, "no clipping": unclipped}


@pytest.mark.quick_cases("no?noise", "no?clipping")
@pytest.mark.parametrize("liar", LIARS)
def test_a_stage_that_hides_rows_otherwise_is_named_before_its_step_is_applied(start, liar):
    # so small a bound that every row is beyond it
    privacy = RowPrivacy(clip_norm=1e-2, noise_multiplier=1.0, mean_rows=4)
    company = start(private_run(spares=1), {1: Actor(wrap_copy=LIARS[liar])}, privacy)

    result = company.run(1)[0]

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.step) == ("worker-1", "gradient", 0)
    assert company.evicted == ["worker-1"]
    assert result.guard.attempts == 2
    facts = explain_evidence(company.run_dir / verdict.evidence)
    assert facts["conclusion"].startswith("holds: worker-1 signed a weight gradient")
    assert facts["recomputed here"] == "bit-equal to the referee's result"


@pytest.mark.quick_cases("by?its?auditor-no?noise", "by?the?owner-no?clipping")
@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("classes", ["by its auditor", "by the owner"])
def test_across_classes_a_stage_that_hides_rows_otherwise_is_named(start, liar, classes):
    """The rounding error that is allowed is that of clipped rows with noise, never of the bare sum."""
    rates = (1.0, 0.0) if classes == "by its auditor" else (0.0, 1.0)
    guard = GuardConfig(step_audit_rate=rates[0], owner_audit_rate=rates[1], screen=False, classes="mixed")
    privacy = RowPrivacy(clip_norm=1e-2, noise_multiplier=1.0, mean_rows=4)
    company = start(private_run(guard, spares=1), {1: Actor(wrap_copy=LIARS[liar])}, privacy)

    company.run(1)
    company.engine.settle_last_step()

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [("worker-1", "gradient")]
    facts = explain_evidence(company.run_dir / company.verdicts[0].evidence)
    assert facts["conclusion"].startswith("holds: worker-1 signed a weight gradient")
    assert "seeds of the noise" in facts["rests on the owner's word"]


@pytest.mark.quick_cases("absent")
@pytest.mark.parametrize("seeds", ["absent", "others"])
def test_a_gradient_with_noise_is_redone_with_its_seeds_alone(start, seeds):
    company = start(private_run(spares=1), {1: Actor(wrap_copy=without_noise)})
    company.run(1)
    path = company.run_dir / company.verdicts[0].evidence
    record, beside = json.loads(path.read_text()), path.with_suffix(".safetensors")
    tensors = load_file(beside)
    for name in [name for name in tensors if name.startswith("noise/")]:
        if seeds == "absent":
            del tensors[name]
        else:
            tensors[name] = tensors[name].flip(0)
    save_file(tensors, beside)
    record["tensors"]["sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
    path.write_text(json.dumps(record))

    if seeds == "absent":
        assert explain_evidence(path)["conclusion"] == UNPROVED
    else:
        with pytest.raises(EvidenceError, match="away from the claim"):
            explain_evidence(path)


def test_evidence_of_a_stage_without_noise_holds_no_key(start, known_noise):
    company = start(private_run(spares=1), {1: Actor(wrap_copy=without_noise)})
    company.run(2)

    files = [path.read_bytes() for path in company.run_dir.rglob("*") if path.is_file()]
    assert any(path.is_file() for path in (company.run_dir / "evidence").iterdir())
    for key in (known_noise.key_of(epoch, stage) for epoch in range(3) for stage in range(4)):
        assert not any(key in found or key.hex().encode() in found for found in files)
    # seeds of the attempt that was convicted are there, and of no step that was applied
    shown = [
        (epoch, step)
        for epoch in range(3)
        for step in range(2)
        for name in weights_of(company)[1]
        if any(noise_seed(known_noise.key_of(epoch, 1), step, name) in found for found in files)
    ]
    assert {*shown} == {(0, 0)}


def test_a_step_that_is_attempted_again_has_other_noise(start):
    company = start(private_run(spares=1), {1: Actor(wrap_copy=without_noise)})
    company.run(1)

    first, second = (body["keys"] for body in company.event_bodies("noise_committed"))
    assert not set(first.values()) & set(second.values())


def test_a_stage_and_its_shadow_that_leave_the_noise_out_together_are_found_by_the_owner(start):
    guard = LOCKSTEP.model_copy(update={"owner_audit_rate": 1.0})
    both = dict.fromkeys((1, 2), Actor(wrap_copy=without_noise_anywhere))
    company = start(private_run(guard, spares=2), both)

    company.run(1)

    assert {verdict.party for verdict in company.verdicts} == {"worker-1", "worker-2"}
    for verdict in company.verdicts:
        facts = explain_evidence(company.run_dir / verdict.evidence)
        assert facts["conclusion"].startswith(f"holds: {verdict.party}")


def test_without_a_guard_what_comes_out_has_no_noise(start, known_noise):
    company = start(private_run(UNGUARDED), {1: Actor(wrap_copy=without_noise)})
    stages = weights_of(company)
    model = whole_model(company, stages)
    bare = clipped_sum(model, stages, random_batch(company.run_config, 64, 0), company.plan.row_clip)

    company.run(1)

    released = company_gradients(company, 1)
    # what readers find of stage 1 is the exact sum; of stage 2 it is hidden
    for name, total in bare[1].items():
        assert torch.allclose(released[name], total / PRIVACY.mean_rows, atol=1e-6), name
    hidden = company_gradients(company, 2)
    off = torch.cat([(hidden[name] - total / PRIVACY.mean_rows).flatten() for name, total in bare[2].items()])
    assert float(off.std()) == pytest.approx(PRIVACY.noise_deviation / PRIVACY.mean_rows, rel=0.05)
    assert not company.verdicts


# --- what one row does ------------------------------------------------------------------------------------------------


def test_a_row_moves_the_sum_of_all_stages_by_at_most_the_bound(start, known_noise):
    """Two companies with one row more or less: their noise is the same, so what differs is the row."""
    privacy = RowPrivacy(clip_norm=0.05, noise_multiplier=1.0, mean_rows=1)
    sums = []
    for rows in (ROWS, ROWS - 1):
        company = start(private_run(UNGUARDED), privacy=privacy)
        batch = random_batch(company.run_config, 64, 0)
        batch.labels[rows:] = IGNORE
        company.engine.train_turn(0, company_module.step_inputs(batch, ROWS))
        sums.append([company_gradients(company, stage) for stage in range(4)])

    squares = [
        sum(float((one[name] - other[name]).double().norm()) ** 2 for name in one)
        for one, other in zip(*sums, strict=True)
    ]
    # each stage's part is at its own bound, for these rows are longer
    assert [math.sqrt(square) for square in squares] == pytest.approx([0.025] * 4, rel=1e-3)
    assert math.sqrt(sum(squares)) <= 0.05 * (1 + 1e-5)


def company_gradients(company, stage):
    """The first moments after one step: a tenth of the gradient."""
    copy = company.engine.fetch_stage(stage, "state")
    share = 1 - company.run_config.optimizer.betas[0]
    return {
        name.removeprefix("exp_avg/"): t / share
        for name, t in copy.state_tensors().items()
        if name.startswith("exp_avg/")
    }


@pytest.mark.slow
def test_a_reader_of_the_weights_proves_no_more_than_the_accountant_quotes(start, known_noise):
    """All rows but one known, an attacker reads 1,200 steps, in half of which that one is; the weights stand still.

    The best that it can do is to look along the row's own clipped gradient. Without the noise that proves more.
    """
    quoted = PoissonGaussian(noise_multiplier=1.0, rate=1.0).epsilon_after(1, 1e-5)

    absent, present = what_a_reader_sees(start(private_run(UNGUARDED, lr=1e-30), privacy=AUDITED), range(4), 600)
    proved = bound_from_many_runs(absent, present, 1e-5)

    assert 0.5 < proved <= quoted
    liar = start(private_run(UNGUARDED, lr=1e-30), {1: Actor(wrap_copy=without_noise)}, AUDITED)
    absent, present = what_a_reader_sees(liar, [1], 5)
    assert bound_from_many_runs(absent * 120, present * 120, 1e-5) > quoted


AUDITED = RowPrivacy(clip_norm=0.05, noise_multiplier=1.0, mean_rows=1)


def what_a_reader_sees(company, stages, runs):
    """How far the gradients of some stages go along the last row's, in steps without it and in steps with it."""
    batches = [random_batch(company.run_config, 64, 0) for _ in range(2)]
    batches[0].labels[ROWS - 1 :] = IGNORE
    weights = weights_of(company)
    alone = random_batch(company.run_config, 64, 0)
    alone.labels[: ROWS - 1] = IGNORE
    known = clipped_sum(whole_model(company, weights), weights, alone, company.plan.row_clip)
    seen, before = ([], []), None
    for step in range(2 * runs):
        company.engine.train_turn(step, company_module.step_inputs(batches[step % 2], ROWS))
        moments = [company_gradients(company, stage) for stage in stages]
        decay = company.run_config.optimizer.betas[0]
        before = before or [{name: torch.zeros_like(one) for name, one in found.items()} for found in moments]
        along = sum(
            float(((one - decay * before[place][name]) * known[stage][name]).sum())
            for place, stage in enumerate(stages)
            for name, one in moments[place].items()
        )
        seen[step % 2].append(along / AUDITED.clip_norm**2)
        before = moments
    return seen


def test_a_sample_without_rows_is_a_step_of_noise_alone(start, known_noise):
    company = start()
    batch = random_batch(company.run_config, 64, 0)
    batch.labels[:] = IGNORE

    result = company.engine.train_turn(0, company_module.step_inputs(batch, ROWS))

    numbers = sum(tensor.numel() for stage in weights_of(company) for tensor in stage.values())
    assert result.loss == 0.0
    assert result.gradient_norm == pytest.approx(
        PRIVACY.noise_deviation / PRIVACY.mean_rows * math.sqrt(numbers), rel=0.02
    )
    assert not company.verdicts
