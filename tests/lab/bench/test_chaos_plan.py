"""Kills are drawn from a seed: each point as often as another, no worker twice, the same failures for every arm."""

import itertools
import math
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.lab.bench.chaos.kill_plan import POINTS, failure_times, plan_kills


def plan(seed: int = 1, count: int = 10):
    return plan_kills(seed, count, workers=2, microbatches=8, gap=5).kills


@pytest.mark.parametrize("count", [5, 10, 50])
def test_every_point_comes_equally_often(count):
    found = Counter(kill.point for kill in plan(count=count))

    assert found == dict.fromkeys(POINTS, count // len(POINTS))


@given(st.integers(0, 1000), st.integers(1, 40))
@settings(deadline=None)
def test_nobody_dies_twice_and_nobody_dies_before_it_was_started(seed, count):
    kills = plan(seed, count)

    names = [int(kill.worker.removeprefix("worker-")) for kill in kills]
    assert len(set(names)) == count
    # the replacement of the n-th death has the number 2 + n
    assert all(name <= 2 + number for number, name in enumerate(names))
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)


def test_a_microbatch_is_chosen_where_there_is_one_to_choose():
    for kill in plan(count=40):
        assert (kill.microbatch is not None) == (kill.point in ("forward", "backward"))
        assert 0.0 <= kill.moment < 1.0


def test_another_seed_is_another_plan_and_the_same_one_is_the_same():
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_failures_come_as_often_as_said():
    times = failure_times(3, 15.0, 4000)

    assert len(times) == 4000
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] <= 4000 * 15.0 - 7.5
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(15.0, rel=0.02)
    # of independent failures: as many gaps above the mean as an exponential has
    assert sum(gap > 15.0 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    assert failure_times(3, 15.0, 10) == failure_times(3, 15.0, 10) != failure_times(4, 15.0, 10)


def test_the_last_failure_of_a_long_window_has_a_minute():
    assert all(failure_times(seed, 300.0, 2)[-1] <= 540.0 for seed in range(200))
