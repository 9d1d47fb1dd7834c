"""Deaths are drawn from a seed: each point as often as another, nobody twice, the same failures for every arm."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.bench.chaos_plan import POINTS, failure_times, plan_kills


def plan(seed: int = 1, count: int = 10):
    return plan_kills(seed, count, workers=2, microbatches=8, gap=5).kills


@pytest.mark.parametrize("count", [5, 10, 50])
def test_every_point_comes_equally_often(count):
    found = Counter(kill.point for kill in plan(count=count))

    assert found == dict.fromkeys(POINTS, count // len(POINTS))


@given(st.integers(0, 1000), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
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

    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(15.0, rel=0.05)
    assert failure_times(3, 15.0, 10) == times[:10]
