"""The baseline of the benches: the un-sliced transformers model, trained in one process without Phalanx."""

import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from phalanx.data import Batch
from phalanx.engine import StepInputs
from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.models import ModelSource, open_model
from phalanx.objectives import causal_lm_loss
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.train import step_inputs


def load_peer_model(source: ModelSource) -> Any:
    """The un-sliced transformers model, ready to train."""
    model = AutoModelForCausalLM.from_pretrained(
        source.directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    return model.train()


def decay_groups(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, as in the engine."""
    all_parameters = list(parameters)
    return [
        {"params": [p for p in all_parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in all_parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw_options(config: OptimizerConfig) -> dict[str, Any]:
    """How torch's AdamW is called."""
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}


class PlainTrainer:
    """Same weights, batches, microbatches, loss, clipping and schedule as the pipeline; torch's own AdamW."""

    def __init__(self, source: ModelSource, optimizer: OptimizerConfig, total_steps: int) -> None:
        self._config = optimizer
        self._total_steps = total_steps
        self._model = load_peer_model(source)
        groups = decay_groups(self._model.parameters(), optimizer)
        self._optimizer = torch.optim.AdamW(groups, **adamw_options(optimizer))

    def train_step(self, step: int, inputs: StepInputs) -> float:
        """Make one optimizer step.

        Returns:
            The mean loss over the batch's targets, in nats.
        """
        loss = 0.0
        for ids, labels in zip(inputs.ids, inputs.labels, strict=True):
            logits = self._model(input_ids=ids, use_cache=False).logits
            total, _ = causal_lm_loss(logits, labels)
            torch.autograd.backward(total / inputs.num_targets)
            loss += float(total.detach())
        if self._config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, self._total_steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss / inputs.num_targets


def training_rate(steps: int) -> float:
    """Return the tokens that a step of the plain model takes in a second of one core, the median over some steps."""
    run, times = scratch_run(), []
    with tempfile.TemporaryDirectory() as cache:
        source = open_model(run.model, Path(cache), run.train.seed)
        trainer = PlainTrainer(source, run.optimizer, run.train.steps)
        ids = torch.randint(0, source.vocab_size, (run.train.batch_size, run.data.sequence_length))
        inputs = step_inputs(Batch(ids, ids, tuple(range(len(ids)))), run.train.microbatches)
        for step in range(steps + 1):
            began = time.process_time()
            trainer.train_step(step, inputs)
            times.append(time.process_time() - began)
    # the first step also allocates
    return ids.numel() / statistics.median(times[1:])
