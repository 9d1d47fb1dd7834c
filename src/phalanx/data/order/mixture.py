"""A mixture of groups by weights: which group sample j is from, exact in every prefix, computed for any j."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MAX_SHARES = 1 << 14
"""The longest period of a mixture; weights that need a longer one are rounded to shares of this one."""


class Mixture:
    """A periodic sequence of groups in which every prefix has each group's share to less than one sample.

    The sequence is made for one period and repeated, so that sample j costs a table look-up, however large j is. Any
    prefix of n samples holds group g between ``n * w_g - 1`` and ``n * w_g + 1`` times, both excluded, where ``w_g``
    is its share: the weight over the sum of weights, rounded to a multiple of ``1 / MAX_SHARES`` where the weights
    have no common denominator as small as that.

    Args:
        weights: Weight of each group, finite, at least 0, with a positive sum.

    Source: Tijdeman 1980, The chairman assignment problem.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = shares_of(weights)
        self._period = sum(self.shares)
        self._groups = _tijdeman_sequence(self.shares)
        num_groups = len(self.shares)
        drawn = self._groups[None, :] == np.arange(num_groups)[:, None]
        # before[g, r]: samples of group g among the first r of a period
        self._before = np.zeros((num_groups, self._period + 1), dtype=np.int64)
        np.cumsum(drawn, axis=1, out=self._before[:, 1:])
        self._places = [np.flatnonzero(row) for row in drawn]

    def assign_groups(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the group of each sample, and how many samples of that group come before it."""
        periods, rest = np.divmod(samples, self._period)
        groups = self._groups[rest]
        return groups, periods * np.asarray(self.shares, dtype=np.int64)[groups] + self._before[groups, rest]

    def group_counts(self, num_samples: int) -> list[int]:
        """Return how many of the first so many samples each group has."""
        periods, rest = divmod(num_samples, self._period)
        return [periods * share + int(self._before[group, rest]) for group, share in enumerate(self.shares)]

    def samples_until(self, group: int, count: int) -> int | None:
        """Return after how many samples a group has had `count`, at least 1; None where it never has."""
        share = self.shares[group]
        if not share:
            return None
        periods, rest = divmod(count - 1, share)
        return periods * self._period + int(self._places[group][rest]) + 1


@lru_cache(maxsize=64)
def mixture_of(weights: tuple[float, ...]) -> Mixture:
    """Return the mixture of these weights, made once."""
    return Mixture(weights)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole shares of one period: exact where a period of `MAX_SHARES` can be, else rounded to it.

    A positive weight keeps at least one share.
    """
    # as they are written: three tenths are 3/10
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    period = math.lcm(*(part.denominator for part in parts))
    if period <= MAX_SHARES:
        return tuple(int(part * period) for part in parts)
    shares = [max(1, math.floor(part * MAX_SHARES)) if part else 0 for part in parts]
    # what rounding left goes to those that lost most by it
    by_loss = sorted(range(len(parts)), key=lambda group: shares[group] - parts[group] * MAX_SHARES)
    for group in by_loss[: max(0, MAX_SHARES - sum(shares))]:
        shares[group] += 1
    return tuple(shares)


def _tijdeman_sequence(shares: Sequence[int]) -> NDArray[np.int64]:
    """Give each place of one period to the group that is due first, among the eligible ones."""
    period, active = sum(shares), [group for group, share in enumerate(shares) if share]
    if len(active) == 1:
        return np.full(period, active[0], dtype=np.int64)
    # all of Tijdeman's fractions over one denominator: exact, and integers
    unit = 2 * len(active) - 2
    common = math.lcm(*(shares[group] for group in active))
    factors = {group: common // shares[group] for group in active}
    num_drawn = dict.fromkeys(active, 0)
    order = np.empty(period, dtype=np.int64)
    for place in range(1, period + 1):
        due = {group: unit * (shares[group] * place - num_drawn[group] * period) for group in active}
        ready = [group for group in active if due[group] >= period]
        # the deadline of a group: (1 - 1/unit - due) / share
        chosen = min(ready, key=lambda group: ((unit - 1) * period - due[group]) * factors[group])
        num_drawn[chosen] += 1
        order[place - 1] = chosen
    return order
