"""Intervals of shares and means, calibration, and tests of two models on the same samples."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.security.privacy.leakage import wilson_interval

Numbers = NDArray[np.float64]
_Z95, _Z80 = 1.959963984540054, 0.8416212335729143
_RESAMPLES = 2000
_NUM_BINS = 10


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval.

    Attributes:
        low: Lower bound; None where so few clusters say nothing about the spread.
        n: Samples, or tokens of a ratio's weights.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    method: str


def share_with_interval(count: int, of: int) -> dict[str, float | int | None]:
    """Return a share with its 95 % interval; None where nothing was counted."""
    if not of:
        return {"share": None, "low": None, "high": None, "count": 0, "of": 0}
    low, high = wilson_interval(count, of)
    return {"share": count / of, "low": low, "high": high, "count": count, "of": of}


def share_interval(hits: Sequence[float], clusters: Sequence[str]) -> Interval:
    """Return the share of hits: Wilson, with as many draws as the clusters are worth.

    Args:
        hits: 0 or 1 each.

    Source: Wilson 1927; Korn and Graubard 1998 (effective sample size, Student's t).
    """
    n, num_clusters = len(hits), len(set(clusters))
    share = sum(hits) / n
    if num_clusters == n:
        return Interval(share, *wilson_interval(sum(hits), n), n, num_clusters, "Wilson")
    if num_clusters < 2:
        return Interval(share, None, None, n, num_clusters, "none: one cluster")
    values, weights = _sum_clusters(hits, [1.0] * n, clusters)
    deviations = values - share * weights
    variance = num_clusters / (num_clusters - 1) * float((deviations**2).sum()) / n**2
    # at 0 and 1 the samples show no variance: then a cluster counts once
    effective = min(float(n), share * (1 - share) / variance) if variance > 0 else float(num_clusters)
    bounds = wilson_interval(share * effective, effective, student_quantile(num_clusters - 1))
    return Interval(share, *bounds, n, num_clusters, "Wilson, clustered")


def ratio_interval(
    values: Sequence[float], weights: Sequence[float], clusters: Sequence[str], seed: int, *, is_weighted: bool = True
) -> Interval:
    """Return the sum of values over that of weights: studentised bootstrap over clusters, jackknife errors.

    Args:
        is_weighted: Whether `n` counts weights rather than samples.

    Source: Efron and Tibshirani 1993, section 12.5.
    """
    # an order of clusters that is not the order of documents
    totals, sizes = _sum_clusters(values, weights, clusters)
    n, num_clusters = round(sum(weights)) if is_weighted else len(values), len(totals)
    value, error = (float(part) for part in _ratios(totals, sizes))
    if num_clusters < 3 or not math.isfinite(value):
        return Interval(value, None, None, n, num_clusters, "none: fewer than 3 clusters")
    if error == 0:
        return Interval(value, value, value, n, num_clusters, "studentised bootstrap")
    draws = np.random.default_rng(seed).integers(0, num_clusters, (_RESAMPLES, num_clusters))
    resampled, errors = _ratios(totals[draws], sizes[draws])
    # a resample of equal clusters has no error of its own; it would say that the figure is infinitely far off
    usable = errors > 0
    if not usable.any():
        return Interval(value, None, None, n, num_clusters, "none: no spread between clusters")
    lower, upper = np.quantile((resampled[usable] - value) / errors[usable], [0.025, 0.975])
    low, high = value - float(upper) * error, value - float(lower) * error
    return Interval(value, low, high, n, num_clusters, "studentised bootstrap")


def mean_interval(values: Sequence[float], clusters: Sequence[str], seed: int) -> Interval:
    """Return the mean; of nothing but zeros and ones as `share_interval`, otherwise as `ratio_interval`."""
    if all(value in (0.0, 1.0) for value in values):
        return share_interval(values, clusters)
    return ratio_interval(values, [1.0] * len(values), clusters, seed, is_weighted=False)


def calibration_interval(confidences: Sequence[float], hits: Sequence[float], seed: int) -> Interval:
    """Return the expected calibration error over ten bins of equal width.

    The interval is a basic bootstrap, whose reflection also takes away the upward bias of a mean of absolute values.

    Source: Naeini et al. 2015; Guo et al. 2017.
    """
    sure, right = np.asarray(confidences, dtype=np.float64), np.asarray(hits, dtype=np.float64)
    # by value, so that no order of documents matters
    order = np.lexsort((right, sure))
    sure, right = sure[order], right[order]
    n = len(sure)
    value = _calibration_error(sure, right)
    if n < 3:
        return Interval(value, None, None, n, n, "none: fewer than 3 samples")
    generator = np.random.default_rng(seed)
    draws = [generator.integers(0, n, n) for _ in range(_RESAMPLES // 2)]
    low, high = np.quantile([_calibration_error(sure[draw], right[draw]) for draw in draws], [0.025, 0.975])
    bounds = max(0.0, 2 * value - float(high)), min(1.0, max(value, 2 * value - float(low)))
    return Interval(value, *bounds, n, n, "basic bootstrap")


def _calibration_error(sure: Numbers, right: Numbers) -> float:
    bins = np.minimum((sure * _NUM_BINS).astype(int), _NUM_BINS - 1)
    gaps = np.bincount(bins, sure, _NUM_BINS) - np.bincount(bins, right, _NUM_BINS)
    return float(np.abs(gaps).sum() / len(sure))


@dataclass(frozen=True)
class PairedTest:
    """A comparison of two models on the same samples.

    Attributes:
        difference: The second minus the first, in the figure's unit.
        p: Two-sided probability of such a difference between equal models.
        smallest: Difference that as many samples find in 4 of 5 cases, at the 5 % level.
        test: McNemar (exact) for zeros and ones, otherwise sign flips of whole clusters.
    """

    difference: float
    low: float | None
    high: float | None
    p: float
    smallest: float | None
    n: int
    test: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def paired_test(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[str],
    seed: int,
    *,
    weights: Sequence[float] = (),
) -> PairedTest:
    """Compare two models by the values of the same samples, of which each is a value a unit of weight.

    Args:
        weights: Weight of each sample; 1 where left out.

    Source: McNemar 1947, exact; Good 2005 (permutations of clusters).
    """
    shares = [1.0] * len(first) if not weights else list(weights)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    interval = ratio_interval(differences, shares, clusters, seed, is_weighted=False)
    totals, sizes = _sum_clusters(differences, shares, clusters)
    value, error = (float(part) for part in _ratios(totals, sizes))
    is_binary = not weights and len(set(clusters)) == len(first)
    is_binary = is_binary and all(number in (0.0, 1.0) for number in (*first, *second))
    if is_binary:
        gained, lost = differences.count(1.0), differences.count(-1.0)
        # without any discordant pair, as many as the rule of three leaves possible
        error = max(error, math.sqrt(3.0) / len(first))
        p, name = _binomial_two_sided(gained, gained + lost), "McNemar, exact"
    else:
        signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), (_RESAMPLES * 5, len(totals)))
        extreme = np.abs(signs @ totals) >= abs(float(totals.sum())) * (1 - 1e-12)
        p, name = (1 + int(extreme.sum())) / (1 + len(signs)), "sign flips of clusters"
    smallest = (_Z95 + _Z80) * error if math.isfinite(error) and len(totals) > 1 else None
    return PairedTest(value, interval.low, interval.high, p, smallest, len(first), name)


def _binomial_two_sided(count: int, of: int) -> float:
    """Return the probability of a count at least as uneven among so many fair throws."""
    fewer = min(count, of - count)
    tail = sum(math.comb(of, number) for number in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**of))


def _ratios(values: Numbers, weights: Numbers) -> tuple[Numbers, Numbers]:
    """Return ratios along the last axis and their standard errors by an approximate jackknife."""
    total = weights.sum(-1)
    ratio = values.sum(-1) / total
    num_clusters = values.shape[-1]
    if num_clusters < 2:
        return ratio, np.full_like(ratio, np.nan)
    rest = np.maximum(1 - weights / total[..., None], 1e-9)
    deviations = (values - ratio[..., None] * weights) / rest
    return ratio, np.sqrt((num_clusters - 1) / num_clusters * (deviations**2).sum(-1)) / total


def _sum_clusters(
    values: Sequence[float], weights: Sequence[float], clusters: Sequence[str]
) -> tuple[Numbers, Numbers]:
    """Return sums by cluster, in the order of their names, which is no order of documents."""
    # exact sums: floats added in another order are other floats
    by_name: dict[str, tuple[list[float], list[float]]] = {}
    for value, weight, name in zip(values, weights, clusters, strict=True):
        pair = by_name.setdefault(name, ([], []))
        pair[0].append(value)
        pair[1].append(weight)
    pairs = [by_name[name] for name in sorted(by_name)]
    return np.array([math.fsum(pair[0]) for pair in pairs]), np.array([math.fsum(pair[1]) for pair in pairs])


def difference_by_chance(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the difference of two means that chance alone exceeds in one of twenty cases.

    Args:
        groups: Two groups with one spread; None is returned where neither has two members.

    Source: Student's t test of two samples with pooled variance.
    """
    degrees = sum(len(group) - 1 for group in groups)
    if not degrees:
        return None
    pooled = sum(variance(group) * (len(group) - 1) for group in groups if len(group) > 1) / degrees
    return student_quantile(degrees) * math.sqrt(pooled * sum(1 / len(group) for group in groups))


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    Source: Abramowitz and Stegun 1964, 26.7.5; closed forms for 1 and 2 degrees.
    """
    if degrees == 1:
        return math.tan(math.pi * 0.475)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))
