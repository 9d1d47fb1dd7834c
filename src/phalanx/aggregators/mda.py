"""Minimum diameter averaging: the mean of the updates that are nearest to each other as a whole."""

import itertools
import math

import torch
from torch import Tensor

from phalanx.aggregators.rule import below_half, squared_distances

MOST_SUBSETS = 200_000


def mda_mean(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of the n - f updates of which the two farthest are nearest; of equal ones the first.

    Source: El-Mhamdi et al. 2021 (minimum-diameter averaging).
    """
    distances = squared_distances(updates).cpu()
    num_honest = len(updates) - byzantine
    best, least = tuple(range(num_honest)), float("inf")
    for subset in itertools.combinations(range(len(updates)), num_honest):
        chosen = torch.tensor(subset)
        widest = float(distances[chosen[:, None], chosen].max())
        if widest < least:
            best, least = subset, widest
    return updates[list(best)].mean(0)


def max_byzantine(clients: int) -> int:
    """Return how many MDA stands while it looks at 200,000 subsets at most."""
    return max((few for few in range(below_half(clients) + 1) if math.comb(clients, few) <= MOST_SUBSETS), default=0)
