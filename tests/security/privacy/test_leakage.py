"""Figures of a leak have their closed forms, and a number that is not finite is never evidence of one."""

import math

import numpy as np
import pytest

from phalanx.security.privacy.leakage import (
    LeakLosses,
    area_interval,
    area_under_curve,
    exposure_bits,
    found_share,
    true_negative_share,
    wilson_interval,
)


def test_exposure_is_log2_of_candidates_over_the_rank():
    assert exposure_bits(0.5, [1.0] * 63) == 6.0
    assert exposure_bits(5.0, [1.0] * 63) == 0.0
    assert exposure_bits(1.5, [1.0, 2.0, 3.0]) == 1.0


@pytest.mark.parametrize("loss", [1.0, math.nan, math.inf])
def test_a_tie_and_a_loss_that_is_not_finite_are_no_exposure(loss):
    assert exposure_bits(loss, [1.0, 1.0, 1.0]) == 0.0


def test_the_area_counts_pairs_and_ties_by_half():
    assert area_under_curve([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert area_under_curve([0.0, 1.0], [0.0, 1.0]) == 0.5
    assert area_under_curve([0.0, 2.0], [1.0, 3.0]) == 0.25
    assert area_under_curve([math.nan], [0.0]) == 0.5


def test_a_perfect_separation_of_few_rows_has_an_interval():
    low, high = area_interval(1.0, 5, 5)

    assert 0.5 < low < 1.0 == high


def test_the_interval_of_an_area_covers_the_truth():
    chance = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        marked, others = chance.normal(0.5, 1, 40), chance.normal(0, 1, 40)
        low, high = area_interval(area_under_curve(marked.tolist(), others.tolist()), 40, 40)
        # of two normals at distance d the area is Phi(d / sqrt 2)
        covered += low <= 0.6382 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_the_interval_of_a_share_covers_the_truth():
    chance = np.random.default_rng(2)
    hits = chance.binomial(50, 0.3, 2000)

    covered = sum(low <= 0.3 <= high for low, high in (wilson_interval(int(hit), 50) for hit in hits)) / 2000
    assert 0.93 <= covered <= 0.97


def test_the_interval_of_a_share_is_exact_at_its_ends_and_wider_for_a_larger_quantile():
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
    # a bound is the share that the score test just does not refuse
    for z in (1.959964, 2.5758293):
        for bound in wilson_interval(3, 10, z):
            assert abs(0.3 - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / 10), rel=1e-6)


def test_members_found_at_a_share_of_false_ones():
    others = [float(number) for number in range(100)]

    assert found_share([200.0, 98.5, 50.0], others, 0.01) == 2 / 3
    assert found_share([200.0, 98.5, 50.0], others, 0.0) == 1 / 3


def test_true_negatives_are_strangers_above_the_loss_of_nearly_all_members():
    members = [number / 100 for number in range(100)]

    assert true_negative_share(members, [0.5, 0.95, 2.0, 3.0]) == 0.75


def test_what_was_not_measured_is_left_out():
    assert LeakLosses().read_leak() == {}
    assert set(LeakLosses(members=(1.0,), strangers=(2.0,)).read_leak()) == {"membership_auc", "true_negatives"}
    assert LeakLosses(canaries=(1.0, 9.0), candidates=(5.0, 6.0, 7.0)).read_leak() == {
        "exposure_bits": 2.0,
        "exposure_mean_bits": 1.0,
    }
