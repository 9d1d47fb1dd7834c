"""Five guarded steps of every family are those of the un-sliced model under torch's own AdamW.

The un-sliced model adds its gradients up over the run's microbatches, as gradient accumulation does: by how the sums of
a batch are cut alone, transformers differs from itself by 4.8e-7 in the losses of a mixture of experts.
"""

import pytest
import torch
from planned_models import PLANNED
from tiny_models import ARCHITECTURES, LAYERS, without_dropout
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from phalanx.data import IGNORE, PREFIX
from phalanx.models import FAMILIES, ModelConfig, parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.optimizers import learning_rate
from phalanx.pipeline import GuardConfig
from phalanx.planner.model.families import FAMILIES as FACTS
from phalanx.testing import MemoryCompany, random_batch, tiny_run
from phalanx.testing.tiny import VOCAB_SIZE
from phalanx.train import TrainConfig

STEPS, WITHIN = 5, 3e-7
QUICK = ("gemma2",)
_ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "pad_token_id": None,
}
_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
OTHERS = {
    "bert": _ENCODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": _ENCODER | {"local_attention": 4, **_NO_TOKENS},
    "t5": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_heads": 4,
        "num_layers": LAYERS // 2,
        "num_decoder_layers": LAYERS // 2,
        "relative_attention_num_buckets": 8,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
}
"""Families that predict something other than the next token, as wide as the tokens that objectives write."""
OBJECTIVES = {
    "next": ("causal_lm", AutoModelForCausalLM),
    "hidden": ("masked", AutoModelForMaskedLM),
    "target": ("span_corruption", AutoModelForSeq2SeqLM),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def config_of(name):
    if name in OTHERS:
        return {"model_type": name} | OTHERS[name]
    return PLANNED[name] if name in PLANNED else without_dropout(ARCHITECTURES[name])


def logits_of(model, batch):
    """What transformers' model predicts, where the batch has its labels."""
    if PREFIX not in batch.extras:
        return model(batch.input_ids).logits
    logits = torch.zeros(*batch.labels.shape, VOCAB_SIZE)
    for row, (ids, border) in enumerate(zip(batch.input_ids, batch.extras[PREFIX].tolist(), strict=True)):
        # the decoder's first token stands in the place of the prefix's last one
        decoded = torch.cat([torch.zeros(1, dtype=torch.int64), ids[border:]])
        logits[row, border - 1 :] = model(input_ids=ids[None, :border], decoder_input_ids=decoded[None]).logits[0]
    return logits


def whole_curve(run, directory, vocab_size, kind):
    """Losses of transformers' model with torch's optimizer and clipping."""
    model = kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True).train()
    config, named = run.optimizer, dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    losses = []
    for step in range(STEPS):
        batch = random_batch(run, vocab_size, step)
        num_targets = (batch.labels != IGNORE).sum()
        optimizer.zero_grad()
        loss = 0.0
        for part in batch.split_microbatches(run.train.microbatches):
            logits = logits_of(model, part).flatten(0, 1)
            total = torch.nn.functional.cross_entropy(
                logits, part.labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            share = total / num_targets
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, run.train.steps)
        optimizer.step()
        losses.append(loss)
    return losses


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_five_guarded_steps_are_those_of_transformers_and_adamw(cache, tmp_path, name):
    hub_config = parse_hub_config(config_of(name), name)
    directory = write_random_model(hub_config, 3, cache, None)
    model = ModelConfig(path=str(directory))
    objective, kind = OBJECTIVES[FACTS[name].predicts]
    run = tiny_run(LAYERS, guard=GuardConfig())
    run = run.model_copy(update={"model": model, "train": TrainConfig(**(dict(run.train) | {"objective": objective}))})

    with MemoryCompany(run, tmp_path, cache=cache) as company:
        results = company.run(STEPS)

    losses = whole_curve(run, directory, hub_config.vocab_size, kind)
    assert [result.loss for result in results] == pytest.approx(losses, rel=WITHIN)
    assert losses[-1] != losses[0]
    assert not any(result.guard.verdicts for result in results)
    assert sum(result.guard.num_audits for result in results) > 0
