"""Patience grows with the machine's load, and never falls."""

import os

import pytest

from machine_patience import patience_s


@pytest.mark.parametrize(("load_by_processor", "times"), [(0, 1), (0.99, 1), (1, 1), (1.5, 1.5), (20, 20)])
def test_a_busy_machine_is_waited_for_as_many_times_longer(load_by_processor, times):
    assert patience_s(10.0, load_by_processor * (os.cpu_count() or 1)) == pytest.approx(10.0 * times)


def test_the_load_of_now_is_asked_for():
    assert patience_s(10.0) >= 10.0
