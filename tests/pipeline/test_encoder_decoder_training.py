"""A T5 on a guarded pipeline: honest steps are one model's, liars at rate 0.3 are named, the clean run's bits stay."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from phalanx.data import IGNORE, PREFIX
from phalanx.errors import ConfigError
from phalanx.lab.attacks import make_actor
from phalanx.objectives import OBJECTIVES
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import Actor, random_batch, tampering, tiny_run
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.setup.layout import check_head
from phalanx.train.train_section import SamplesConfig

KINDS = [kind for kind, one in OBJECTIVES.items() if one.attention == "prefix"]
STEPS = 4


def learning(kind="span_corruption", **changes) -> PipelineRun:
    run = tiny_run(**changes)
    architecture = {
        "model_type": "t5",
        "vocab_size": run.model.architecture["vocab_size"],
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_heads": 2,
        # of four stages the first two have the encoder's blocks
        "num_layers": 2,
        "num_decoder_layers": 2,
        "relative_attention_num_buckets": 6,
        "relative_attention_max_distance": 8,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    return run.model_copy(
        update={
            "data": run.data.model_copy(update={"sequence_length": 16}),
            "model": run.model.model_copy(update={"architecture": architecture}),
            "train": type(run.train)(**{**run.train.model_dump(), "objective": kind}),
        }
    )


def whole_gradient(source, batch):
    """Mean loss and gradient norm of transformers' model, row by row."""
    model = AutoModelForSeq2SeqLM.from_pretrained(source.directory, dtype=torch.float32, local_files_only=True).train()
    total = torch.zeros(())
    for row, (ids, labels) in enumerate(zip(batch.input_ids, batch.labels, strict=True)):
        prefix = max(int(batch.extras[PREFIX][row]), 1)
        started = torch.cat([torch.zeros(1, dtype=torch.int64), ids[prefix:]])
        logits = model(input_ids=ids[None, :prefix], decoder_input_ids=started[None]).logits[0]
        wanted = labels[prefix - 1 :].contiguous()
        total = total + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum")
    loss = total / int((batch.labels != IGNORE).sum())
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    return float(loss.detach()), float(norm)


@pytest.mark.quick_cases("span_corruption")
@pytest.mark.parametrize("kind", KINDS)
def test_a_guarded_step_is_that_of_transformers_model(make_company, kind):
    run = learning(kind, guard=GuardConfig(audit_rate=1.0, step_audit_rate=1.0, owner_audit_rate=1.0))
    company = make_company(run)
    batch = random_batch(run, company.source.vocab_size, 0)

    result = company.engine.train_turn(0, step_inputs(batch, run.train.microbatches))

    loss, norm = whole_gradient(company.source, batch)
    assert result.loss == pytest.approx(loss, rel=3e-6)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert company.verdicts == []
    assert result.guard.num_audits > 0


@pytest.mark.quick_cases("sign_flip-1")
@pytest.mark.parametrize(("attack", "stage"), [("sign_flip", 1), ("gaussian", 2)])
def test_a_liar_at_rate_03_is_named_in_its_first_step_and_no_bit_is_lost(
    make_company, honest_digest, tmp_path, attack, stage
):
    run = learning(guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    config = AttackConfig(kind=attack, stages=(stage,), rate=0.3, seed=3)
    company = make_company(run, {stage: make_actor(config, f"worker-{stage}", tmp_path / "attack.jsonl")})

    company.run(STEPS)

    (verdict,) = company.verdicts
    assert (tmp_path / "attack.jsonl").read_text().splitlines(), "the attacker has lied"
    assert verdict.party == f"worker-{stage}"
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_without_the_guard_the_same_liar_changes_what_is_learned(make_company, honest_digest, tmp_path):
    run = learning(guard=GuardConfig(mode="off"))
    config = AttackConfig(kind="sign_flip", stages=(2,), rate=0.3, seed=3)
    company = make_company(run, {2: make_actor(config, "worker-2", tmp_path / "attack.jsonl")})

    company.run(STEPS)

    assert company.weights_digest() != honest_digest(run, STEPS)


def moved_border(tensor):
    tensor[..., 1:, -1] = tensor[..., 1:, -1].roll(-1, dims=1)


def other_memory(tensor):
    tensor[:, 0, :-1] *= -1


def other_biases(tensor):
    tensor[:, -1, :-1] += 0.5


@pytest.mark.quick_cases("other_memory")
@pytest.mark.parametrize("lie", [moved_border, other_memory, other_biases])
def test_a_worker_that_alters_what_it_only_hands_on_is_named(make_company, honest_digest, lie):
    def altered(direction, step, microbatch, tensor):
        changed = tensor.clone()
        if direction == "forward" and step == 1:
            lie(changed)
        return changed

    run = learning(guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    company = make_company(run, {2: Actor(wrap_copy=tampering(altered))})

    company.run(3)

    assert {verdict.party for verdict in company.verdicts} == {"worker-2"}
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.parametrize("kind", ["causal_lm", "masked", "fill_in_the_middle"])
def test_an_objective_without_a_text_for_the_encoder_is_refused_before_the_first_step(make_company, kind):
    with pytest.raises(ConfigError, match="but t5 has only prefix"):
        make_company(learning(kind))


@pytest.mark.parametrize("part", ["masked", "causal_lm"])
def test_a_mixture_with_tokens_that_are_predicted_where_they_stood_is_refused(make_company, part):
    mixture = {"kind": "denoisers", "tasks": [{"kind": "span_corruption"}, {"kind": part}]}
    if part == "causal_lm":
        assert make_company(learning(mixture)).plan.effective_attention == "prefix"
        return
    with pytest.raises(
        ConfigError, match="need logits of the text that the encoder reads, but t5 has only those of what"
    ):
        make_company(learning(mixture))


def test_texts_are_written_by_decoders_alone(make_company):
    run = learning()
    samples = SamplesConfig(prompts=("a",))
    train = run.train.model_copy(update={"samples": samples})

    with pytest.raises(ConfigError, match=r"train\.samples: t5 has an encoder"):
        check_head(run.model_copy(update={"train": train}), make_company(run).source)
