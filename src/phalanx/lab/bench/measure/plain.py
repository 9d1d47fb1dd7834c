"""The baseline of the benches: the un-sliced transformers model, trained in one process without Phalanx."""

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from phalanx.engine import StepInputs
from phalanx.models import ModelSource
from phalanx.objectives import causal_lm
from phalanx.optimizers import OptimizerConfig, learning_rate


class PlainTrainer:
    """Same weights, batches, microbatches, loss, clipping and schedule as the pipeline; torch's own AdamW."""

    def __init__(self, source: ModelSource, optimizer: OptimizerConfig, total_steps: int) -> None:
        self._config = optimizer
        self._total_steps = total_steps
        self._model = AutoModelForCausalLM.from_pretrained(
            source.directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self._model.train()
        parameters = list(self._model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )

    def step(self, step: int, inputs: StepInputs) -> float:
        """Make one optimizer step.

        Returns:
            The mean loss over the batch's targets, in nats.
        """
        loss = 0.0
        for ids, labels in zip(inputs.ids, inputs.labels, strict=True):
            logits = self._model(input_ids=ids, use_cache=False).logits
            total, _ = causal_lm(logits, labels)
            torch.autograd.backward(total / inputs.num_targets)
            loss += float(total.detach())
        self._clip(self._model.parameters())
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, self._total_steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss / inputs.num_targets

    def _clip(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._config.clip_norm)
