"""Layers to stages: the uneven partition is the best there is."""

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.planner.cost.partition import balanced_layers, rank_placements, uneven_layers

COSTS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)
SPEEDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)


def all_partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    return [tuple(end - first for first, end in pairwise(cut)) for cut in cuts]


def slowest_stage_seconds(counts: Sequence[int], costs: Sequence[float], speeds: Sequence[float]) -> float:
    stages = zip(accumulate(counts, initial=0), counts, speeds, strict=False)
    return max(sum(costs[first : first + count]) / speed for first, count, speed in stages)


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(costs=COSTS, speeds=SPEEDS)
def test_no_other_partition_is_faster(costs: list[float], speeds: list[float]) -> None:
    found = uneven_layers(costs, speeds)

    others = all_partitions(len(costs), len(speeds)) if len(costs) >= len(speeds) else []
    if not others:
        assert found is None
        return
    assert found is not None
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert slowest_stage_seconds(found, costs, speeds) == pytest.approx(
        min(slowest_stage_seconds(one, costs, speeds) for one in others)
    )


@settings(deadline=None)
@given(costs=COSTS, speeds=SPEEDS, room=st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_no_other_partition_that_fits_is_faster(costs: list[float], speeds: list[float], room: list[int]) -> None:
    found = uneven_layers(costs, speeds, lambda stage, first, end: end - first <= room[stage])

    others = [
        one
        for one in all_partitions(len(costs), len(speeds))
        if len(costs) >= len(speeds) and all(count <= room[stage] for stage, count in enumerate(one))
    ]
    if not others:
        assert found is None
        return
    assert found in others
    assert slowest_stage_seconds(found, costs, speeds) == pytest.approx(
        min(slowest_stage_seconds(one, costs, speeds) for one in others)
    )


def test_equal_layers_on_equal_ranks_are_spread_evenly() -> None:
    assert balanced_layers([1.0] * 12, 4) == (3, 3, 3, 3)
    assert sorted(balanced_layers([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_rank_twice_as_fast_gets_twice_the_layers() -> None:
    assert uneven_layers([1.0] * 12, [1.0, 2.0, 1.0]) == (3, 6, 3)


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 layers for 3 stages"):
        balanced_layers([1.0, 1.0], 3)


def test_equal_devices_are_not_told_apart_when_orders_are_tried() -> None:
    found = rank_placements(["a", "b", "a"], lambda kind: 1.0)

    assert sorted(found) == [("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")]


def test_a_large_pool_is_put_in_the_order_of_its_memory() -> None:
    kinds = [f"kind-{number % 4}" for number in range(16)]

    assert rank_placements(kinds, lambda kind: float(kind[-1])) == [tuple(sorted(kinds, reverse=True))]
