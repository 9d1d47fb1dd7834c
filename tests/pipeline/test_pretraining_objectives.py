"""Every objective of pre-training on a guarded pipeline: honest steps are one model's, liars at rate 0.3 are named."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx.data import IGNORE, PREFIX
from phalanx.errors import ConfigError
from phalanx.lab.attacks import make_actor
from phalanx.models import FAMILIES
from phalanx.objectives import OBJECTIVES
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import Actor, random_batch, tampering, tiny_run
from phalanx.train import PipelineRun, step_inputs

KINDS = [kind for kind, one in OBJECTIVES.items() if one.rewriting is not None]
WITH_PREFIXES = [kind for kind in KINDS if OBJECTIVES[kind].attention == "prefix"]
STEPS = 3


def learning(kind, **changes) -> PipelineRun:
    run = tiny_run(**changes)
    data = run.data.model_copy(update={"sequence_length": 16})
    architecture = {**run.model.architecture, "n_positions": 16}
    return run.model_copy(
        update={
            "data": data,
            "model": run.model.model_copy(update={"architecture": architecture}),
            "train": type(run.train)(**{**run.train.model_dump(), "objective": kind}),
        }
    )


def whole_gradient(source, batch, kind):
    """Mean loss and gradient norm of the un-sliced model, row by row, with a mask that is written out."""
    model = AutoModelForCausalLM.from_pretrained(
        source.directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).train()
    total, seq = torch.zeros(()), batch.input_ids.shape[1]
    for row, (ids, labels) in enumerate(zip(batch.input_ids, batch.labels, strict=True)):
        prefix = {"bidirectional": seq, "causal": 0}.get(OBJECTIVES[kind].attention)
        if prefix is None:
            prefix = int(batch.extras[PREFIX][row])
        seen = torch.tensor([[b <= a or b < prefix for b in range(seq)] for a in range(seq)])
        hides = torch.zeros(seq, seq).masked_fill(~seen, torch.finfo(torch.float32).min)
        logits = model(ids.unsqueeze(0), attention_mask=hides[None, None]).logits
        total = total + torch.nn.functional.cross_entropy(logits[0], labels, ignore_index=IGNORE, reduction="sum")
    loss = total / int((batch.labels != IGNORE).sum())
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_guarded_step_is_that_of_the_un_sliced_model(make_company, kind):
    run = learning(kind, guard=GuardConfig(audit_rate=1.0, step_audit_rate=1.0, owner_audit_rate=1.0))
    company = make_company(run)
    batch = random_batch(run, company.source.vocab_size, 0)

    result = company.engine.train_turn(0, step_inputs(batch, run.train.microbatches))

    loss, norm = whole_gradient(company.source, batch, kind)
    assert result.loss == pytest.approx(loss, rel=3e-6)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert company.verdicts == []
    assert result.guard.num_audits > 0


ATTACKS = ["sign_flip", "gaussian"]
LIARS = [
    # each objective and each attack quickly, their other pairs among the slow tests
    pytest.param(kind, attack, marks=() if at % 2 == number % 2 else pytest.mark.slow)
    for at, kind in enumerate(KINDS)
    for number, attack in enumerate(ATTACKS)
]


@pytest.mark.quick_cases("span_corruption-sign_flip", "prefix_lm-gaussian")
@pytest.mark.parametrize(("kind", "attack"), LIARS)
def test_a_liar_at_rate_03_is_named_in_its_first_step_and_no_bit_is_lost(
    make_company, honest_digest, tmp_path, kind, attack
):
    run = learning(kind, guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    config = AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=3)
    company = make_company(run, {2: make_actor(config, "worker-2", tmp_path / "attack.jsonl")})

    company.run(STEPS)

    (verdict,) = company.verdicts
    lies = (tmp_path / "attack.jsonl").read_text().splitlines()
    assert lies, "the attacker has lied"
    assert verdict.party == "worker-2"
    assert company.evicted == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_without_the_guard_the_same_liar_changes_what_is_learned(make_company, honest_digest, tmp_path):
    run = learning("masked", guard=GuardConfig(mode="off"))
    config = AttackConfig(kind="sign_flip", stages=(2,), rate=0.3, seed=3)
    company = make_company(run, {2: make_actor(config, "worker-2", tmp_path / "attack.jsonl")})

    company.run(STEPS)

    assert company.weights_digest() != honest_digest(run, STEPS)


# the column of prefixes travels alike whatever drew it
@pytest.mark.parametrize(
    "kind", [WITH_PREFIXES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in WITH_PREFIXES[1:])]
)
def test_a_worker_that_shortens_a_prefix_is_named(make_company, honest_digest, kind):
    def shorten(direction, step, microbatch, tensor):
        moved = tensor.clone()
        if direction == "forward" and step == 1:
            moved[..., 1:, -1] = moved[..., 1:, -1].roll(-1, dims=1)
        return moved

    run = learning(kind, guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    company = make_company(run, {1: Actor(wrap_copy=tampering(shorten))})

    company.run(2)

    assert {verdict.party for verdict in company.verdicts} == {"worker-1"}
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_family_without_the_attention_is_refused_before_the_first_step(make_company, monkeypatch):
    monkeypatch.setattr(type(FAMILIES["gpt2"]), "attention_kinds", frozenset({"causal"}))

    with pytest.raises(ConfigError, match="its rows need prefix attention, but gpt2 has only causal"):
        make_company(learning("prefix_lm"))
