"""A mixture holds every group's share in every prefix, and is computed for any sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order.mixture import MAX_SHARES, Mixture, shares_of

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=6).filter(any)


@settings(deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**15))
def test_every_prefix_has_each_share_to_less_than_one_sample(weights, start):
    mixture = Mixture(weights)
    period = sum(mixture.shares)
    before = mixture.group_counts(start)

    groups, ranks = mixture.assign_groups(start + np.arange(300))

    for n in range(300):
        assert ranks[n] == before[groups[n]]
        before[groups[n]] += 1
        for share, count in zip(mixture.shares, before, strict=True):
            assert abs(count * period - share * (start + n + 1)) < period
    assert before == mixture.group_counts(start + 300)


@settings(deadline=None)
@given(weights=WEIGHTS, count=st.integers(1, 10**9))
def test_a_group_has_had_a_number_of_samples_just_then(weights, count):
    mixture = Mixture(weights)

    for group, weight in enumerate(weights):
        end = mixture.samples_until(group, count)

        assert (end is None) == (weight == 0)
        if end is not None:
            assert mixture.group_counts(end)[group] == count
            assert mixture.group_counts(end - 1)[group] == count - 1


def test_weights_are_shares_as_they_are_written():
    assert shares_of([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert shares_of([3.0]) == (1,)
    assert shares_of([1.0, 0.0, 3.0]) == (1, 0, 3)


def test_weights_without_a_small_denominator_are_rounded_and_none_vanishes():
    shares = shares_of([123457.0, 1.0, 7654321.0])

    assert abs(sum(shares) - MAX_SHARES) <= 1
    assert shares[1] == 1
    assert shares[0] / sum(shares) == pytest.approx(123457 / 7777779, abs=2 / MAX_SHARES)


def test_many_groups_of_odd_weights_are_mixed():
    weights = [1.0 + number / 7 for number in range(40)]
    mixture = Mixture(weights)
    period = sum(mixture.shares)

    counts = np.array([mixture.group_counts(n) for n in range(0, period, 97)])
    expected = np.arange(0, period, 97)[:, None] * np.array(mixture.shares) / period

    assert np.abs(counts - expected).max() < 1
