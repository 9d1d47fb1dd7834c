"""Krum: the update, or the updates, with the nearest neighbours."""

import torch
from torch import Tensor

from phalanx.aggregators.rule import squared_distances


def krum_update(updates: Tensor, byzantine: int) -> Tensor:
    """Return the one update that is nearest to the others.

    Source: Blanchard et al. 2017.
    """
    return updates[_krum_scores(updates, byzantine).argmin()].clone()


def multi_krum(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of all but as many updates as may be Byzantine, those with the farthest neighbours.

    Source: Blanchard et al. 2017.
    """
    nearest = torch.sort(_krum_scores(updates, byzantine), stable=True).indices[: len(updates) - byzantine]
    return updates[nearest.sort().values].mean(0)


def max_byzantine(clients: int) -> int:
    """Return how many Krum stands: n must be 2f + 3 at least."""
    return max(0, (clients - 3) // 2)


def _krum_scores(updates: Tensor, byzantine: int) -> Tensor:
    """Return for each update the sum of squared distances to its n - f - 1 nearest others."""
    ordered = squared_distances(updates).sort(dim=1).values
    # the first is the distance to itself
    return ordered[:, 1 : max(2, len(updates) - byzantine)].sum(1)
