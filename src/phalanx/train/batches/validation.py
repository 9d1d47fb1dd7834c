"""Held-out perplexity, computed by the trusted owner alone from the weights that it has collected."""

import math
from collections.abc import Iterable, Sequence

import torch

from phalanx.data import Batch, without_attention
from phalanx.models import StageModule, with_marks
from phalanx.objectives import OBJECTIVES, Objective

_MAX_NATS = 700
"""Of a mean loss; the exponential of more is no double."""


def measure_perplexities(stages: Iterable[StageModule], sets: Sequence[Iterable[Batch]]) -> list[float]:
    """Perplexity of a chain of stages on each of several sets.

    Args:
        stages: All stages in order; each is used once for all batches of all sets and can then be dropped.

    Returns:
        ``exp`` of the mean loss over all target tokens of a set, in nats; infinity when it overflows.
    """
    return [perplexity_of(total, count) for total, count in summed_losses(stages, sets)]


@torch.no_grad()
def summed_losses(
    stages: Iterable[StageModule],
    sets: Sequence[Iterable[Batch]],
    objective: Objective = OBJECTIVES["causal_lm"],
) -> list[tuple[float, int]]:
    """Loss of a chain of stages over all targets of each of several sets, in nats, and how many there are.

    Args:
        stages: All stages in order; each is used once for all batches of all sets and can then be dropped.
        objective: The loss, and what its targets are: tokens, unless it is said otherwise.
    """
    numbered_batches = [(number, batch) for number, batches in enumerate(sets) for batch in batches]
    tensors = [with_marks(batch.input_ids, batch.extras) for _, batch in numbered_batches]
    totals, counts = [0.0] * len(sets), [0] * len(sets)
    for stage in stages:
        was_training = stage.training
        stage.eval()
        device = next(stage.parameters()).device
        for n, (number, batch) in enumerate(numbered_batches):
            y = stage(tensors[n].to(device))
            tensors[n] = y
            if stage.spec.is_last:
                # logits are large: reduced at once, one batch at a time
                extras = {name: rows.to(device) for name, rows in without_attention(batch.extras).items()}
                read = {name: extras[name] for name in objective.extras}
                loss, targets = objective(y, batch.labels.to(device), read)
                totals[number] += float(loss)
                counts[number] += targets
                tensors[n] = batch.input_ids
        stage.train(was_training)
    return list(zip(totals, counts, strict=True))


def measure_perplexity(stages: Iterable[StageModule], batches: Iterable[Batch]) -> float:
    """Perplexity of a chain of stages on one set; see `perplexities`."""
    return measure_perplexities(stages, [batches])[0]


def perplexity_of(total_loss: float, count: int) -> float:
    """Perplexity of so many tokens with such a loss in all; infinity when it overflows, or of none."""
    return math.exp(total_loss / count) if count and total_loss / count < _MAX_NATS else math.inf
