"""Covariance-bound-agnostic filter: weights fall along the direction in which the updates vary most."""

import torch
from torch import Tensor

from phalanx.aggregators.rule import inner_products, weighted_mean


def caf_mean(updates: Tensor, byzantine: int) -> Tensor:
    """Return, of the weighted means on the way, the one around which the updates vary least.

    While more than n - 2f of the weight is left, each update loses weight by its squared projection on the principal
    direction of the weighted covariance. The direction is exact, by the n x n matrix of inner products, where the
    authors take a step of power iteration.

    Source: Allouah et al. 2025 (CAF).
    """
    gram = inner_products(updates)
    weights = torch.ones(len(updates), dtype=torch.float64, device=updates.device)
    best, least = weights, float("inf")
    while float(weights.sum()) > max(len(updates) - 2 * byzantine, 0.5):
        share = weights / weights.sum()
        # inner products of what is left when the weighted mean is taken away
        moved = gram - (gram @ share)[:, None] - (share @ gram)[None, :] + share @ gram @ share
        root = share.sqrt()
        values, vectors = torch.linalg.eigh(root[:, None] * moved * root[None, :])
        if float(values[-1]) < least:
            best, least = weights, float(values[-1])
        projections = (moved @ (root * vectors[:, -1])) ** 2
        # of an update without weight the projection would only slow the others down
        largest = float(projections[weights > 0].max())
        if largest <= 0:
            break
        weights = weights * (1 - projections / largest).clamp(min=0)
    return weighted_mean(updates, best)
