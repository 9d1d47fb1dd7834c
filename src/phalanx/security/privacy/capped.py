"""Poisson samples for a step with a fixed number of places: the privacy cost where rows beyond them are left out.

A pipeline runs the same number of microbatches in each step. Which rows a sample has decides whether it fits, so rows
that are left out are no part of what Poisson sampling earns; that a sample does not fit is charged to delta instead.
"""

import math
from dataclasses import dataclass

from phalanx.security.privacy.accountant import PoissonGaussian

SPILLED = 0.01
"""Share of delta that is kept for samples that do not fit."""


@dataclass(frozen=True)
class CappedPoissonGaussian(PoissonGaussian):
    """One step's mechanism where rows beyond `places` are left out of the sample.

    Guarantees:
        As `PoissonGaussian`. Steps in which the sample fits have that mechanism; the chance that any does not fit,
        times ``1 + e^epsilon``, is at most `SPILLED` of delta, or epsilon is infinite.

    Source: Chua et al. 2024 (scalable DP-SGD: shuffling vs. Poisson subsampling), truncated Poisson batches.
    """

    rows: int
    places: int

    def epsilon_after(self, steps: int, delta: float) -> float:
        epsilon = super().epsilon_after(steps, (1 - SPILLED) * delta)
        chance = spill_chance(self.rows, self.rate, self.places)
        return epsilon if _is_within_delta(chance, steps, epsilon, delta) else math.inf


def spill_chance(rows: int, rate: float, places: int) -> float:
    """Return the chance that a sample has more rows than places; an upper bound."""
    if places >= rows:
        return 0.0
    if rate >= 1:
        return 1.0
    least = places + 1
    log_first = (
        math.lgamma(rows + 1)
        - math.lgamma(least + 1)
        - math.lgamma(rows - least + 1)
        + least * math.log(rate)
        + (rows - least) * math.log1p(-rate)
    )
    # each further chance is at most so much of the one before: the sum is at most that of a geometric series
    ratio = (rows - least) * rate / ((least + 1) * (1 - rate))
    return 1.0 if ratio >= 1 else min(1.0, math.exp(log_first) / (1 - ratio))


def max_mean_rows(rows: int, places: int, steps: int, epsilon: float, delta: float) -> int:
    """Return the most rows that a step may draw in the mean, so that samples fit into its places for all of a run.

    Returns:
        0 where not even one row a step is few enough.
    """

    def fits(mean: int) -> bool:
        return _is_within_delta(spill_chance(rows, mean / rows, places), steps, epsilon, delta)

    low, high = 0, min(rows, places) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _is_within_delta(chance: float, steps: int, epsilon: float, delta: float) -> bool:
    """Whether the share of delta that is kept for it pays for this chance in each of so many steps."""
    # by logarithms: e^epsilon may be more than a float holds
    cost = (
        -math.inf if chance == 0 or steps == 0 else math.log(chance * steps) + epsilon + math.log1p(math.exp(-epsilon))
    )
    return cost <= math.log(SPILLED * delta)
