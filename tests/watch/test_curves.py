"""Curves of any length in as many points as a screen has, and no peak is lost."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.watch.curves import CurveHistory, flatten_row
from phalanx.watch.growing_files import GrowingRows


def history_of(values, start=0):
    history = CurveHistory()
    for step, value in enumerate(values, start):
        history.add_row({"step": step, "loss": value})
    return history


def test_a_short_curve_is_returned_as_it_is():
    shown = history_of([3.0, None, 1.0]).decimate(["loss", "lr"], 10)

    assert shown == {"step": [0.0, 1.0, 2.0], "loss": [3.0, None, 1.0], "lr": [None, None, None]}


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300),
    st.integers(4, 50),
    st.integers(0, 100),
    st.integers(0, 400),
)
def test_the_lowest_and_the_highest_value_of_a_range_are_shown(values, max_points, first, last):
    shown = history_of(values).decimate(["loss"], max_points, first, last)

    inside = [value for value in values[first : last + 1] if value is not None]
    found = [value for value in shown["loss"] if value is not None]
    assert len(shown["step"]) == len(shown["loss"]) <= max_points
    assert shown["step"] == sorted(shown["step"])
    assert (min(found, default=None), max(found, default=None)) == (
        min(inside, default=None),
        max(inside, default=None),
    )


def test_one_peak_in_a_million_steps_is_shown():
    history = CurveHistory()
    for step in range(1_000_000):
        history.add_row({"step": step, "loss": 1.0})
    history._values["loss"][654_321] = 99.0

    shown = history.decimate(["loss"], 800)

    assert max(shown["loss"]) == 99.0
    place = shown["step"][shown["loss"].index(99.0)]
    assert abs(place - 654_321) < 2 * 1_000_000 / 400
    assert len(shown["step"]) <= 800


@pytest.mark.slow
def test_a_file_of_a_million_steps_is_read_and_shown_by_parts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1_000_000):
            file.write(f'{{"step": {step}, "loss": {5 / (1 + step / 1e5):.5f}, "phases": {{"compute": 1.5}}}}\n')
    rows, history, number = GrowingRows(path), CurveHistory(), 0
    while found := rows.read_new()[0]:
        number += len(found)
        for row in found:
            history.add_row(row)

    assert number == history.num_rows == 1_000_000
    whole, part = history.decimate(["loss"], 1200), history.decimate(["loss"], 1200, 500_000, 500_500)
    assert (len(whole["step"]), len(part["step"])) == (1200, 501)
    assert len(json.dumps(whole)) < 100_000


def test_a_run_that_went_back_stays_in_order_of_steps():
    history = history_of([1.0, 2.0, 3.0])
    history.add_row({"step": 1, "loss": 2.5})

    assert history.decimate(["loss"], 10)["step"] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("step", [None, True, -1, 1.5, "3", 1 << 60])
def test_a_row_without_a_step_is_left_out(step):
    history = CurveHistory()
    history.add_row({"step": step, "loss": 1.0})

    assert history.num_rows == 0


def test_numbers_alone_become_curves_and_their_number_is_bounded():
    row = {"step": 3, "time": 9.0, "loss": 1, "attacked": True, "batch": "ab", "phases": {"wait": 0.5, "name": "x"}}

    assert flatten_row(row) == {"loss": 1.0, "phases.wait": 0.5}
    assert flatten_row({"phases": {"worker-1": {"compute": 2}}}) == {"phases.worker-1.compute": 2.0}
    assert flatten_row({"loss": 10**400}) == {}
    history = CurveHistory()
    history.add_row({"step": 0, **{f"curve{number}": 1.0 for number in range(1000)}})
    assert len(history.curve_names) == 256


def test_a_number_that_is_infinite_is_a_gap():
    history = history_of([1.0, math.inf, -math.inf, math.nan])

    assert history.decimate(["loss"], 10)["loss"] == [1.0, None, None, None]
    assert np.isinf(history.last_values("loss", 9)).sum() == 2
