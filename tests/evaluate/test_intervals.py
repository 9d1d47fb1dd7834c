"""Intervals hold the truth as often as they say, simulated and, for single shares, summed exactly."""

import math
import random
import statistics

import numpy as np
import pytest

from phalanx.evaluate.intervals import (
    calibration_interval,
    difference_by_chance,
    mean_interval,
    paired_test,
    ratio_interval,
    share_interval,
    share_with_interval,
)
from phalanx.security.privacy.leakage import wilson_interval

SIZES = (20, 50, 200)


def exact_coverage(n, share):
    """Probability of the counts whose interval holds the share."""
    total = 0.0
    for count in range(n + 1):
        low, high = wilson_interval(count, n)
        if low <= share <= high:
            total += math.comb(n, count) * share**count * (1 - share) ** (n - count)
    return total


@pytest.mark.parametrize("n", SIZES)
def test_wilson_covers_93_to_97_percent_over_the_shares(n):
    """At one share it swings by the steps of the counts; over all shares it must not."""
    covered = [exact_coverage(n, share) for share in np.linspace(0.05, 0.95, 181)]

    assert 0.93 <= sum(covered) / len(covered) <= 0.97
    assert min(covered) > 0.90


def coverage_of(draw, repetitions, seed):
    """How often intervals of simulated samples hold the truth, with the interval of that share itself."""
    generator = np.random.default_rng(seed)
    intervals = [draw(generator) for _ in range(repetitions)]
    return share_with_interval(sum(one.low <= truth <= one.high for one, truth in intervals), repetitions)


def clustered_share(n, shape):
    def draw(generator):
        sizes = generator.integers(1, 6, n)
        hits = [generator.binomial(1, p, size) for p, size in zip(generator.beta(*shape, n), sizes, strict=True)]
        names = [str(number) for number, size in enumerate(sizes) for _ in range(size)]
        return share_interval([float(hit) for part in hits for hit in part], names), shape[0] / sum(shape)

    return draw


def mean_nats(n):
    def draw(generator):
        tokens = np.round(np.exp(generator.normal(5, 0.3, n)))
        nats = 3 * np.exp(generator.normal(-0.045, 0.3, n)) * tokens
        return ratio_interval(nats.tolist(), tokens.tolist(), [str(number) for number in range(n)], 1), 3.0

    return draw


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (20, 20)])
def test_clustered_shares_cover(n, shape):
    covered = coverage_of(clustered_share(n, shape), 1500, 7)

    assert 0.93 <= covered["share"] <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_nats_of_a_token_cover(n):
    covered = coverage_of(mean_nats(n), 1000, 3)

    assert covered["high"] >= 0.93
    assert covered["low"] <= 0.97


def test_order_of_samples_changes_no_bit():
    values, weights = [0.1, 5.3, 2.2, 1e-9, 7.1], [3.0, 2.0, 9.0, 4.0, 1.0]
    names = ["a", "b", "a", "c", "d"]
    order = [4, 2, 0, 3, 1]

    straight = ratio_interval(values, weights, names, 5)
    shuffled = ratio_interval(*[[part[place] for place in order] for part in (values, weights, names)], 5)

    assert straight == shuffled


def test_clusters_widen_an_interval():
    hits = [1.0] * 50 + [0.0] * 50
    apart = share_interval(hits, [str(number) for number in range(100)])
    together = share_interval(hits, [str(number // 10) for number in range(100)])

    assert apart.value == together.value == 0.5
    assert together.high - together.low > 2 * (apart.high - apart.low)


@pytest.mark.parametrize("hits", [[0.0] * 12, [1.0] * 12])
def test_a_share_of_nothing_or_all_keeps_an_open_end(hits):
    interval = share_interval(hits, [str(number // 3) for number in range(12)])

    assert interval.high - interval.low > 0.3
    assert interval.low == 0.0 or interval.high == 1.0


def test_one_cluster_has_no_interval():
    assert share_interval([1.0, 0.0], ["a", "a"]).low is None
    assert mean_interval([0.5, 0.7, 0.1], ["a", "a", "b"], 0).low is None


def test_a_calibrated_model_has_a_small_error():
    generator = np.random.default_rng(2)
    sure = generator.uniform(0, 1, 4000)
    right = (generator.uniform(0, 1, 4000) < sure).astype(float)

    calibrated = calibration_interval(sure.tolist(), right.tolist(), 0)
    boastful = calibration_interval([0.95] * 400, [1.0, 0.0] * 200, 0)

    assert calibrated.value < 0.03
    assert boastful.value == pytest.approx(0.45)
    assert boastful.low < 0.45 < boastful.high


def test_mcnemar_equals_its_closed_form():
    first, second = [1.0] * 8 + [0.0] * 12, [1.0] * 8 + [1.0] * 5 + [0.0] * 7
    names = [str(number) for number in range(20)]

    test = paired_test(first, second, names, 0)

    assert test.difference == pytest.approx(0.25)
    assert test.p == pytest.approx(2 / 2**5)
    assert test.test == "McNemar, exact"
    assert 0.2 < test.smallest < 0.4


def test_equal_models_show_no_difference_but_a_smallest_one():
    test = paired_test([1.0, 0.0] * 10, [1.0, 0.0] * 10, [str(number) for number in range(20)], 0)

    assert (test.difference, test.p) == (0.0, 1.0)
    assert test.smallest > 0.1


def test_a_difference_in_every_cluster_is_found_by_sign_flips():
    first = [1.0 + 0.01 * number for number in range(30)]
    second = [value + 0.5 + 0.001 * number for number, value in enumerate(first)]

    test = paired_test(first, second, [str(number) for number in range(30)], 0)

    assert test.p < 0.001
    assert test.low < test.difference < test.high


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (8, 8), (1, 3)])
def test_of_two_means_of_one_kind_one_of_twenty_differs_by_more_than_chance(sizes):
    draw = random.Random(sum(sizes))
    pairs = [[[draw.gauss(3.0, 0.1) for _ in range(size)] for size in sizes] for _ in range(4000)]

    exceeded = sum(
        abs(statistics.fmean(first) - statistics.fmean(other)) > difference_by_chance([first, other])
        for first, other in pairs
    )

    assert exceeded / len(pairs) == pytest.approx(0.05, abs=0.015)
    assert difference_by_chance([[3.0], [4.0]]) is None
