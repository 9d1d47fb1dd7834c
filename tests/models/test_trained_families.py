"""Five guarded steps of every family are those of the un-sliced model under torch's own AdamW."""

import pytest
import torch
from planned_models import PLANNED
from tiny_models import ARCHITECTURES, LAYERS, without_dropout
from transformers import AutoModelForCausalLM

from phalanx.data import IGNORE
from phalanx.models import FAMILIES, ModelConfig, parse_hub_config
from phalanx.models.scratch import write_random_model
from phalanx.optimizers import learning_rate
from phalanx.pipeline import GuardConfig
from phalanx.testing import MemoryCompany, random_batch, tiny_run

STEPS, WITHIN = 5, 3e-7
QUICK = ("gemma2", "mistral", "qwen3")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def config_of(name):
    return PLANNED[name] if name in PLANNED else without_dropout(ARCHITECTURES[name])


def whole_curve(run, directory, vocab_size):
    """Losses and gradient norms of transformers' model with torch's optimizer and clipping."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).train()
    config, named = run.optimizer, dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    losses = []
    for step in range(STEPS):
        batch = random_batch(run, vocab_size, step)
        logits = model(batch.input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, run.train.steps)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_five_guarded_steps_are_those_of_transformers_and_adamw(cache, tmp_path, name):
    hub_config = parse_hub_config(config_of(name), name)
    directory = write_random_model(hub_config, 3, cache, None)
    model = ModelConfig(path=str(directory))
    run = tiny_run(LAYERS, guard=GuardConfig()).model_copy(update={"model": model})

    with MemoryCompany(run, tmp_path, cache=cache) as company:
        results = company.run(STEPS)

    losses = whole_curve(run, directory, hub_config.vocab_size)
    assert [result.loss for result in results] == pytest.approx(losses, rel=WITHIN)
    assert losses[-1] != losses[0]
    assert not any(result.guard.verdicts for result in results)
    assert sum(result.guard.num_audits for result in results) > 0
