"""Schedules played through on paper: their bubbles, what they hold, and that they are the runtime's own orders."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.planner.cost.schedule import StageTimes, bubble_formula, play_orders, simulate_step
from phalanx.planner.schedules import SCHEDULES, Work, max_in_flight, rank_orders

EQUAL = StageTimes(forward=1.0, inputs=1.0, weights=1.0)
SIZES = st.integers(1, 8)


@settings(deadline=None)
@given(ranks=SIZES, microbatches=st.integers(1, 24), schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_formula(ranks: int, microbatches: int, schedule: str) -> None:
    timeline = simulate_step(schedule, ranks, microbatches, [EQUAL] * ranks)

    assert timeline.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert bubble_formula(ranks, microbatches) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@settings(deadline=None)
@given(ranks=st.integers(2, 6), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
def test_the_bubble_of_interleaved_stages_is_divided_by_their_number(ranks: int, rounds: int, chunks: int) -> None:
    timeline = simulate_step("interleaved", ranks, rounds * ranks, [EQUAL] * (ranks * chunks))

    assert timeline.bubble_share == pytest.approx((ranks - 1) / (chunks * rounds * ranks + ranks - 1))


@settings(deadline=None)
@given(ranks=SIZES, more=st.integers(0, 12))
def test_zero_bubble_waits_a_third_as_long_as_1f1b_and_holds_no_more(ranks: int, more: int) -> None:
    microbatches = ranks + more
    works = 3.0 * microbatches

    waited = simulate_step("zero-bubble", ranks, microbatches, [EQUAL] * ranks).length_s - works

    assert waited == pytest.approx((simulate_step("1f1b", ranks, microbatches, [EQUAL] * ranks).length_s - works) / 3)
    assert all(max_in_flight(order) <= ranks for order in rank_orders("zero-bubble", ranks, microbatches))


@settings(deadline=None)
@given(ranks=st.integers(2, 6), rounds=st.integers(1, 4), chunks=st.integers(2, 3))
def test_interleaved_zero_bubble_waits_a_third_as_long_as_interleaved_and_holds_what_1f1b_does(
    ranks: int, rounds: int, chunks: int
) -> None:
    microbatches, times = rounds * ranks, [EQUAL] * (ranks * chunks)
    works = 3.0 * microbatches * chunks

    waited, usual = (
        simulate_step(name, ranks, microbatches, times).length_s - works
        for name in ("interleaved-zero-bubble", "interleaved")
    )

    assert waited == pytest.approx(usual / 3)
    # each is a part of a microbatch's layers
    orders = rank_orders("interleaved-zero-bubble", ranks, microbatches, chunks)
    assert all(max_in_flight(order) <= ranks * chunks for order in orders)


@settings(deadline=None)
@given(
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    send=st.floats(0, 2),
)
def test_every_piece_of_work_is_done_once_and_in_an_order_that_is_possible(
    ranks: int, rounds: int, schedule: str, send: float
) -> None:
    chunks = SCHEDULES[schedule].chunks
    stages, microbatches = ranks * chunks, rounds * ranks
    timeline = simulate_step(schedule, ranks, microbatches, [EQUAL] * stages, send)

    ends = {slot.work: slot.end for slot in timeline.slots}
    assert len(ends) == len(timeline.slots) == stages * microbatches * (3 if SCHEDULES[schedule].splits_backward else 2)
    for slot in timeline.slots:
        assert slot.rank == slot.work.stage % ranks
        if slot.work.kind == "forward" and slot.work.stage:
            assert slot.start >= ends[Work("forward", slot.work.stage - 1, slot.work.microbatch)] + send - 1e-9
        if slot.work.kind in ("backward", "inputs"):
            assert slot.start >= ends[Work("forward", slot.work.stage, slot.work.microbatch)] - 1e-9
    for rank in range(ranks):
        mine = [slot for slot in timeline.slots if slot.rank == rank]
        assert all(one.end <= two.start + 1e-9 for one, two in pairwise(mine))


def test_gpipe_holds_all_microbatches_and_1f1b_only_as_many_as_there_are_ranks() -> None:
    assert [max_in_flight(order) for order in rank_orders("gpipe", 4, 12)] == [12, 12, 12, 12]
    assert [max_in_flight(order) for order in rank_orders("1f1b", 4, 12)] == [4, 3, 2, 1]
    assert [max_in_flight(order) for order in rank_orders("interleaved", 4, 12, 2)] == [11, 9, 7, 5]


def test_the_slowest_stage_sets_the_pace() -> None:
    slow = StageTimes(2.0, 2.0, 2.0)

    timeline = simulate_step("1f1b", 2, 100, [EQUAL, slow])

    assert timeline.length_s == pytest.approx(100 * 6 + 2.0 + 1.0, abs=1.0)


def test_a_link_with_a_delay_makes_the_bubble_larger() -> None:
    without, with_delay = (simulate_step("1f1b", 4, 8, [EQUAL] * 4, delay) for delay in (0.0, 0.5))

    assert with_delay.bubble_share > without.bubble_share


def test_a_link_that_is_slower_than_the_stages_sets_the_pace() -> None:
    all_forward_first = simulate_step("gpipe", 2, 100, [EQUAL, EQUAL], transfer_s=10.0)
    two_in_flight = simulate_step("1f1b", 2, 100, [EQUAL, EQUAL], transfer_s=10.0)

    # a hundred results each way; with two in flight, each pair takes a whole way there and back
    assert all_forward_first.length_s == pytest.approx(2 * 100 * 10.0, rel=0.01)
    assert two_in_flight.length_s == pytest.approx(100 / 2 * (10.0 + 10.0 + 6.0), rel=0.01)


def test_orders_that_wait_for_each_other_are_found() -> None:
    first = (Work("backward", 0, 0), Work("forward", 0, 0))
    second = (Work("forward", 1, 0), Work("backward", 1, 0))

    with pytest.raises(ValueError, match="4 pieces of work wait for each other"):
        play_orders([first, second], [EQUAL, EQUAL])
