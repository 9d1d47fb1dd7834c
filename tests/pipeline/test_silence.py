"""How long nothing may happen before somebody is asked."""

import pytest

from phalanx.pipeline import silence
from phalanx.pipeline.silence import Silence


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(silence, "time", clock)
    return clock


def after_a_step_with_a_gap_of(seconds, clock, *, broken=False):
    found = Silence(patience_s=2.0)
    found.begin()
    clock.now += seconds
    found.heard()
    if broken:
        found.broken()
    found.end()
    found.begin()
    return found


@pytest.mark.parametrize(("gap", "is_too_long"), [(1.9, False), (2.1, True)])
def test_a_gap_is_too_long_when_patience_is_at_its_end(clock, gap, is_too_long):
    found = after_a_step_with_a_gap_of(0.1, clock)

    clock.now += gap

    assert found.too_long == is_too_long


@pytest.mark.parametrize(("gap", "is_too_long"), [(11.9, False), (12.1, True)])
def test_where_honest_steps_had_long_gaps_four_times_as_long_is_waited(clock, gap, is_too_long):
    found = after_a_step_with_a_gap_of(3.0, clock)

    clock.now += gap

    assert found.too_long == is_too_long


def test_the_gap_of_a_step_in_which_somebody_had_to_be_asked_is_no_honest_one(clock):
    found = after_a_step_with_a_gap_of(3.0, clock, broken=True)

    clock.now += 2.1

    assert found.too_long


def test_a_sign_of_life_begins_a_new_gap(clock):
    found = after_a_step_with_a_gap_of(0.1, clock)
    clock.now += 1.9
    found.heard()

    clock.now += 1.9

    assert not found.too_long
