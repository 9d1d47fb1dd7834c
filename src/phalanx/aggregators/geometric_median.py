"""The geometric median: the point with the least sum of distances to all updates."""

import torch
from torch import Tensor

from phalanx.aggregators.rule import inner_products, weighted_mean

_MOST_TURNS = 2000
_LEAST_CHANGE = 1e-9
_NEAREST = 1e-12


def geometric_median(updates: Tensor, byzantine: int) -> Tensor:
    """Return the geometric median, by Weiszfeld's iteration.

    Each turn takes a mean of the updates with the inverse distances as weights, distances below 1e-12 of the largest
    counted as that; it ends when no weight changes by 1e-9. Distances come from the inner products, so that a turn
    costs nothing that grows with the values.

    Source: Weiszfeld 1937; Pillutla et al. 2022 (RFA).
    """
    gram = inner_products(updates)
    weights = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64, device=updates.device)
    for _ in range(_MOST_TURNS):
        to_all = gram @ weights
        distances = (gram.diagonal() - 2 * to_all + weights @ to_all).clamp(min=0).sqrt()
        if not (largest := float(distances.max())):
            break
        before, weights = weights, 1 / distances.clamp(min=largest * _NEAREST)
        weights = weights / weights.sum()
        if float((weights - before).abs().max()) < _LEAST_CHANGE:
            break
    return weighted_mean(updates, weights)
