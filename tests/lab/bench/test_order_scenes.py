"""The scenes in which a loader stops and goes on with other ranks, and what of them is told."""

import json
import sys

import pytest

from phalanx.errors import DataError
from phalanx.lab.bench.data import data as data_bench


def test_our_loader_loses_and_repeats_nothing_in_any_scene():
    found = data_bench.measure_order(None)

    assert (found["lost"], found["repeated"], found["refused"], found["peers"]) == (0, 0, 0, {})
    assert [one["before"] != one["after"] for one in found["scenes"]].count(True) == 2
    assert json.loads(json.dumps(found)) == found


def test_a_loader_that_begins_again_is_counted(monkeypatch):
    monkeypatch.setattr(data_bench.BatchLoader, "load_position", lambda loader, state: None)

    found = data_bench.measure_order(None)

    # each scene goes on with the first samples once more, and never comes to the last ones
    assert (
        found["lost"]
        == found["repeated"]
        == sum(
            min(one["before"] * one["batch"] * one["steps"], one["rows"] - one["before"] * one["batch"] * one["steps"])
            for one in found["scenes"]
        )
    )


def test_a_peer_that_cannot_run_is_told_and_a_refused_scene_counts_for_nothing():
    with pytest.raises(DataError, match="have datasets and torchdata"):
        data_bench.measure_order(sys.executable)
    with pytest.raises(DataError, match="did not run"):
        data_bench.measure_order("/nowhere/python")
    refused = {"lost": None, "repeated": None, "refused": "IndexError"}
    assert data_bench._sum_scenes([refused, {"lost": 2, "repeated": 1, "refused": None}]) == {
        "lost": 2, "repeated": 1, "refused": 1, "by_scene": [refused, {"lost": 2, "repeated": 1, "refused": None}],
    }  # fmt: skip
