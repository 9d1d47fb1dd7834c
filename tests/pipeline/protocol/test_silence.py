"""How long nothing may happen before parties are asked for their progress."""

import pytest

from phalanx.pipeline.protocol import requests
from phalanx.pipeline.protocol.requests import AwakeClock, Patience


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(requests, "time", clock)
    return clock


def listen(found, clock, seconds):
    """Let time pass for an owner that looks at its mail all the while."""
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        _ = found.is_too_long


def a_step(found, clock, gap, *, broken=False):
    found.begin_attempt()
    listen(found, clock, gap)
    if broken:
        found.note_probe()
    found.note_message()
    found.end_attempt()
    found.begin_attempt()


def after_a_step_with_a_gap_of(seconds, clock, *, broken=False):
    found = Patience(2.0, AwakeClock())
    a_step(found, clock, seconds, broken=broken)
    return found


@pytest.mark.parametrize(("gap", "is_too_long"), [(1.9, False), (2.1, True)])
def test_a_gap_is_too_long_when_patience_is_at_its_end(clock, gap, is_too_long):
    found = after_a_step_with_a_gap_of(0.1, clock)

    listen(found, clock, gap)

    assert found.is_too_long == is_too_long


@pytest.mark.parametrize(("gap", "is_too_long"), [(4.7, False), (5.0, True)])
def test_where_honest_steps_had_long_gaps_four_times_as_long_is_waited(clock, gap, is_too_long):
    found = after_a_step_with_a_gap_of(1.2, clock)

    listen(found, clock, gap)

    assert found.is_too_long == is_too_long


def test_the_gap_of_a_step_in_which_somebody_had_to_be_asked_is_no_honest_one(clock):
    found = after_a_step_with_a_gap_of(3.0, clock, broken=True)

    listen(found, clock, 2.1)

    assert found.is_too_long


def test_a_sign_of_life_begins_a_new_gap(clock):
    found = after_a_step_with_a_gap_of(0.1, clock)
    listen(found, clock, 1.9)
    found.note_message()

    listen(found, clock, 1.9)

    assert not found.is_too_long


def test_who_slows_every_step_down_a_little_more_does_not_make_patience_endless(clock):
    found = Patience(2.0, AwakeClock())

    for _ in range(10):
        a_step(found, clock, 0.9 * found.limit_s)

    assert found.limit_s == 8.0


@pytest.mark.parametrize(("gap", "is_too_long"), [(7.9, False), (8.1, True)])
def test_where_no_honest_gaps_are_known_the_upper_end_counts(clock, gap, is_too_long):
    found = Patience(2.0, AwakeClock())

    listen(found, clock, gap)

    assert found.is_beyond_any_limit == is_too_long


def test_a_slow_step_is_forgotten_when_a_hundred_others_were_quick(clock):
    found = after_a_step_with_a_gap_of(1.9, clock)
    assert found.limit_s > 7.0

    for _ in range(100):
        a_step(found, clock, 0.1)

    assert found.limit_s == 2.0


def test_an_owner_that_was_stopped_itself_holds_that_against_nobody(clock):
    found = after_a_step_with_a_gap_of(0.1, clock)

    clock.now += 3600.0

    assert not found.is_too_long
    listen(found, clock, 1.5)
    assert found.is_too_long


def test_there_is_one_knock_in_a_gap_well_before_it_is_too_long(clock):
    found = after_a_step_with_a_gap_of(0.1, clock)
    listen(found, clock, 0.5)
    assert not found.is_time_to_probe()
    listen(found, clock, 0.5)

    assert [found.is_time_to_probe() for _ in range(3)] == [True, False, False]
    found.note_message()
    listen(found, clock, 1.0)
    assert found.is_time_to_probe()
