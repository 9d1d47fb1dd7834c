"""The tail of honest distances: an upper bound from the largest ones that were seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST = 20
"""Exceedances without which no tail is fitted."""

_Z95 = 1.6449
"""Normal quantile of one-sided 95 % confidence."""


@dataclass(frozen=True)
class Tail:
    """Peaks over a threshold u, as logarithms: how many there are, and how far beyond they lie on average.

    The bound on the share of messages beyond tau is ``p exp(-w t)`` with ``t = log(tau / u)``, where w solves
    ``1 - w m = exp(-w t)``; p bounds the share beyond u and m the mean of ``log(e / u)`` there, each
    with 95 % confidence.

    Guarantees:
        Holds for messages drawn alike and independently, if the generalised failure rate ``e h(e)`` of their
        largest token distance does not fall beyond u: normal, exponential, Gumbel, log-normal, bounded and pure
        Pareto tails. Says nothing of honest paths that were not measured.

    Source: Barlow and Marshall 1964, Bounds for distributions with monotone hazard rate, Annals of
    Mathematical Statistics 35, for the bound; Hill 1975 for the mean logarithm as a measure of a tail.
    """

    num_messages: int
    num_beyond: int
    start: float
    """u, the largest distance that is not counted as beyond."""
    share_beyond: float
    """p."""
    mean_log_excess: float
    """m."""

    def share_above(self, tau: float) -> float:
        """Upper bound on the share of honest messages with a distance beyond tau; 1 below `start`."""
        if not tau >= self.start:
            return 1.0
        t, m = math.log(tau / self.start), self.mean_log_excess
        if t <= m:
            return self.share_beyond
        rate = 1.0 / m
        for _ in range(200):
            rate = -math.expm1(-rate * t) / m
        return self.share_beyond * math.exp(-rate * t)

    def threshold_for(self, share: float) -> float:
        """Smallest tau, to one part in a thousand, beyond which at most this share of honest messages lies."""
        low = high = self.start
        while self.share_above(high) > share:
            low, high = high, high * 2.0
        while high > low * 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.share_above(middle) > share else (low, middle)
        return high


def fit_tail(maxima: Sequence[float]) -> Tail | None:
    """Fit the largest tenth of the messages, at least 20 of them.

    Args:
        maxima: Largest token distance of each message; finite.

    Returns:
        None when fewer than 20 messages stand out from the rest: too few, or nearly all of them bit-equal.
    """
    ordered = sorted(maxima, reverse=True)
    num_tail = max(_FEWEST, len(ordered) // 10)
    if len(ordered) <= num_tail or ordered[num_tail] <= 0.0:
        return None
    start = ordered[num_tail]
    excesses = [math.log(value / start) for value in ordered[:num_tail]]
    mean = sum(excesses) / num_tail
    if mean <= 0.0:
        return None
    n, k = len(ordered), num_tail
    # the share beyond the (k+1)-th largest of n is a Beta(k+1, n-k) variable, whatever the distribution
    share = (k + 1) / (n + 1)
    share += _Z95 * math.sqrt(share * (1.0 - share) / (n + 2))
    # exact for exponential excesses, wide for lighter tails: the sum of k of them is chi-square with 2k degrees
    return Tail(n, k, start, min(share, 1.0), mean * 2 * k / _chi_square_5_percent(2 * k))


def _chi_square_5_percent(degrees: int) -> float:
    """Lower 5 % quantile, by the cube-root approximation: exact to 1 part in 1000 from 40 degrees on.

    Source: Wilson and Hilferty 1931.
    """
    spread = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - spread - _Z95 * math.sqrt(spread)) ** 3)
