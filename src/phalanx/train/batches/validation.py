"""Held-out perplexity, computed by the trusted owner alone from the weights that it has collected."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.data import Batch
from phalanx.models import StageModule
from phalanx.objectives import causal_lm


@torch.no_grad()
def perplexity(stages: Iterable[StageModule], batches: Iterable[Batch]) -> float:
    """Perplexity of a chain of stages.

    Args:
        stages: All stages in order; each is used once for all batches and can then be dropped.
        batches: Validation batches.

    Returns:
        ``exp`` of the mean loss over all target tokens, in nats; infinity when it overflows.
    """
    kept = list(batches)
    tensors: list[Tensor] = [batch.input_ids for batch in kept]
    total, count = 0.0, 0
    for stage in stages:
        was_training = stage.training
        stage.eval()
        device = next(stage.parameters()).device
        for n, batch in enumerate(kept):
            y = stage(tensors[n].to(device))
            tensors[n] = y
            if stage.spec.is_last:
                # logits are large: reduced at once, one batch at a time
                loss, targets = causal_lm(y, batch.labels.to(device))
                total, count = total + float(loss), count + targets
                tensors[n] = batch.input_ids
        stage.train(was_training)
    return math.exp(total / count) if count and total / count < 700 else math.inf
