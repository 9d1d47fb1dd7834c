"""What failures, audits and seals cost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.planner.cost.estimate import (
    daly_interval,
    device_to_cluster_mtbf,
    goodput_share,
)
from phalanx.planner.guard.finding import FIXED_SHARE, Verification, sealed_bandwidth

HOUR = 3600.0


@given(save=st.floats(0.1, 600), mtbf=st.floats(600, 1e6), factor=st.floats(0.3, 3.0))
def test_no_other_interval_does_noticeably_better_than_dalys(save: float, mtbf: float, factor: float) -> None:
    best = goodput_share(daly_interval(save, mtbf), save, 60.0, mtbf)
    other = goodput_share(max(1.0, daly_interval(save, mtbf) * factor), save, 60.0, mtbf)

    assert best >= other - 0.01


def test_goodput_is_that_of_failures_drawn_at_random() -> None:
    interval, save, restart, mtbf = 900.0, 60.0, 300.0, 3 * HOUR
    draw = random.Random(1)
    clock = done = 0.0
    failure = draw.expovariate(1 / mtbf)
    for _ in range(40_000):
        start = clock
        while failure < start + interval + save:
            # a restart that is struck begins again
            start = failure + restart
            failure += draw.expovariate(1 / mtbf)
            while failure < start:
                start = failure + restart
                failure += draw.expovariate(1 / mtbf)
        clock = start + interval + save
        done += interval

    assert goodput_share(interval, save, restart, mtbf) == pytest.approx(done / clock, rel=0.01)


def test_a_thousand_devices_fail_a_thousand_times_as_often() -> None:
    assert device_to_cluster_mtbf(50_000 * HOUR, 1000) == pytest.approx(50 * HOUR)


def test_nothing_lasts_where_everything_fails_before_it_is_saved() -> None:
    assert goodput_share(1e6, 60.0, 300.0, 1.0) == 0.0


def test_audits_that_fill_the_bubble_take_no_time_of_their_own() -> None:
    light = Verification(audit_rate=0.125)

    assert light.extra_compute == pytest.approx(0.72 * 0.125 + FIXED_SHARE)
    assert light.extra_time(bubble=0.09) == pytest.approx(FIXED_SHARE * 0.91)
    assert light.extra_time(bubble=0.0) == pytest.approx(light.extra_compute)


@given(q=st.floats(0, 1), p=st.floats(0, 1), bubble=st.floats(0, 0.9))
def test_more_audits_never_cost_less_and_a_larger_bubble_never_more(q: float, p: float, bubble: float) -> None:
    guard = Verification(q, p)

    assert Verification(min(1.0, q + 0.1), p).extra_time(bubble) >= guard.extra_time(bubble)
    assert guard.extra_time(min(0.95, bubble + 0.05)) <= guard.extra_time(bubble) + 1e-12


def test_a_sealed_link_is_slower_than_the_cipher_and_than_the_wire() -> None:
    sealed = sealed_bandwidth(25e9)

    assert sealed < 1.26e9
    assert sealed_bandwidth(1e6) == pytest.approx(1e6, rel=0.001)
