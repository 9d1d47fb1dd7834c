"""The order of a run as a property: every epoch of a group has each sequence once, whatever stops and changes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order import Curriculum, Group, Phase, RunOrder
from phalanx.errors import DataError

SCORES = {"length": [5, 1, 4, 1, 3, 9, 2, 6], "quality": [0.1, 0.9, 0.5, 0.3, 0.2, 0.8, 0.7, 0.4]}


def group(name: str, size: int) -> Group:
    return Group(name, size, name.encode().hex().ljust(64, "0"), lambda by: np.resize(SCORES[by], size))


def drawn(order: RunOrder, start: int, stop: int) -> list[tuple[str, int]]:
    """Group and sequence within it of each sample."""
    edges = np.cumsum([0, *(one.size for one in order.groups)])
    numbers = order.sample_sequences(np.arange(start, stop))
    where = np.searchsorted(edges, numbers, side="right") - 1
    return [(order.groups[at].name, int(number - edges[at])) for at, number in zip(where, numbers, strict=True)]


CURRICULA = st.none() | st.builds(
    Curriculum, by=st.sampled_from(["length", "quality"]), buckets=st.integers(1, 9), descending=st.booleans()
)


@st.composite
def orders(draw):
    sizes = draw(st.lists(st.integers(1, 23), min_size=1, max_size=4))
    ends = sorted(draw(st.sets(st.integers(1, 150), max_size=3)))
    weights = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(sizes), max_size=len(sizes)).filter(any)
    phases = [Phase(until, tuple(draw(weights)), draw(CURRICULA)) for until in [*ends, None]]
    groups = [group(f"g{number}", size) for number, size in enumerate(sizes)]
    return RunOrder(groups, phases, draw(st.integers(0, 99)))


@settings(deadline=None)
@given(order=orders())
def test_every_epoch_of_a_group_has_each_sequence_once_over_all_phases(order):
    samples = drawn(order, 0, 300)

    for one in order.groups:
        own = [number for name, number in samples if name == one.name]
        for begin in range(0, len(own) - one.size + 1, one.size):
            assert sorted(own[begin : begin + one.size]) == list(range(one.size))
        rest = own[len(own) // one.size * one.size :]
        assert len(set(rest)) == len(rest)
        assert order.consumed_by_group(300)[one.name] == len(own)


@settings(deadline=None)
@given(order=orders())
def test_every_prefix_of_a_phase_has_its_mixture_to_less_than_one_sample(order):
    samples = drawn(order, 0, 300)
    schedule = order.schedule
    ends = [start for start, _ in schedule.starts[1:]] + [300]

    for (start, _), end, phase in zip(schedule.starts, ends, schedule.phases, strict=True):
        for stop in range(start, end + 1):
            counts = Counter(name for name, _ in samples[start:stop])
            for one, weight in zip(order.groups, phase.weights, strict=True):
                assert abs(counts[one.name] - weight / sum(phase.weights) * (stop - start)) < 1


@settings(deadline=None)
@given(order=orders(), data=st.data())
def test_a_run_that_stops_and_goes_on_with_other_numbers_of_ranks_loses_and_repeats_none(order, data):
    whole = drawn(order, 0, 240)
    seen: list[tuple[str, int]] = []

    while len(seen) < 240:
        ranks = data.draw(st.integers(1, 7), label="ranks")
        rows = data.draw(st.integers(1, 5), label="rows of a rank")
        for _ in range(data.draw(st.integers(1, 4), label="steps until it stops")):
            at = len(seen)
            # each rank computes its own slice of the step, and nothing else
            shares = [drawn(order, at + rank * rows, at + (rank + 1) * rows) for rank in range(ranks)]
            seen += [sample for share in shares for sample in share]

    assert seen[:240] == whole


def test_a_sample_far_away_needs_nothing_before_it():
    order = RunOrder(
        [group("web", 10**8), group("code", 10**6)], [Phase(10**9, (0.9, 0.1)), Phase(None, (0.5, 0.5))], seed=1
    )

    found = drawn(order, 10**12, 10**12 + 512)

    assert Counter(name for name, _ in found) == {"web": 256, "code": 256}
    assert order.consumed_by_group(10**9) == {"web": 9 * 10**8, "code": 10**8}


def test_a_curriculum_orders_buckets_and_each_epoch_begins_again():
    phases = [Phase(None, (1.0,), Curriculum("quality", buckets=4))]
    order = RunOrder([group("web", 8)], phases, seed=2)

    scores = [SCORES["quality"][number] for _, number in drawn(order, 0, 16)]

    for epoch in (scores[:8], scores[8:]):
        assert [sorted(epoch[at : at + 2]) for at in range(0, 8, 2)] == [
            [0.1, 0.2], [0.3, 0.4], [0.5, 0.7], [0.8, 0.9],
        ]  # fmt: skip


def test_a_curriculum_that_begins_in_an_epoch_orders_what_is_left_of_it():
    phases = [Phase(3, (1.0,)), Phase(None, (1.0,), Curriculum("quality", buckets=8, descending=True))]
    order = RunOrder([group("web", 8)], phases, seed=2)

    scores = [SCORES["quality"][number] for _, number in drawn(order, 0, 16)]

    assert sorted(scores[:8]) == sorted(SCORES["quality"])
    assert scores[3:8] == sorted(scores[3:8], reverse=True)
    assert scores[8:] == sorted(SCORES["quality"], reverse=True)


@settings(deadline=None)
@given(
    limits=st.tuples(st.none() | st.integers(1, 40), st.none() | st.integers(1, 40), st.integers(1, 40)),
    until=st.integers(1, 60),
)
def test_a_group_at_its_limit_gives_no_more_and_the_others_go_on_by_their_weights(limits, until):
    groups = [group(name, 10) for name in ("a", "b", "c")]
    order = RunOrder(groups, [Phase(until, (2.0, 1.0, 1.0)), Phase(None, (1.0, 1.0, 1.0))], 5, limits)
    end = order.schedule.num_samples
    samples = drawn(order, 0, 200 if end is None else end)

    counts = Counter(name for name, _ in samples)

    for one, limit in zip(groups, limits, strict=True):
        assert limit is None or counts[one.name] <= limit
    if end is not None:
        assert counts == dict(zip("abc", limits, strict=True))
        with pytest.raises(DataError, match=f"sample {end} is out of range: data.repeats allows {end}"):
            order.sample_sequences(np.array([end]))


def test_one_group_without_phases_has_the_order_that_it_always_had():
    order = RunOrder([group("", 10)], [Phase(None, (1.0,))], seed=7)

    assert [number for _, number in drawn(order, 8, 16)] == [2, 8, 7, 6, 8, 4, 9, 5]
