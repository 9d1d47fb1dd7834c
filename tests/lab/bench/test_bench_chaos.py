"""``phalanx bench chaos`` on a tiny model: real processes die at each point, and a run is killed again and again."""

from dataclasses import replace

import pytest

from phalanx.lab.bench import BENCHES, KEEPING_ROWS
from phalanx.lab.bench.chaos.chaos import ChaosWorkload, measure_chaos, open_chaos_rows, small_workload
from phalanx.lab.bench.chaos.goodput import ARMS, Window
from phalanx.lab.bench.chaos.kill_plan import POINTS


@pytest.fixture
def small(tiny):
    return ChaosWorkload(tiny, runs=1, kills=5, gap=12, windows=(Window(4.0, 2, 8.0, 3.0),))


def test_the_bench_can_be_asked_for_and_keeps_its_rows():
    assert BENCHES["chaos"] is KEEPING_ROWS["chaos"]


def test_the_whole_bench_kills_a_hundred_workers_and_the_quick_one_at_each_point():
    whole, quick = small_workload(False), small_workload(True)

    assert whole.runs * whole.kills == 100
    assert (quick.runs * quick.kills) % len(POINTS) == 0
    assert [window.mean_s for window in whole.windows] == list(whole.means_s)
    assert [window.mean_s for window in quick.windows] == [15.0]


def test_nothing_is_run_where_only_finished_rows_are_wanted(small, tmp_path):
    result = measure_chaos(
        small, open_chaos_rows(tmp_path / "rows.jsonl", "this"), tmp_path, quick=True, only_finished=True
    )

    assert (result["missing"], result["rows"]) == (3, [])
    assert result["goodput"] == {"15": None, "30": None, "60": None, "300": None}
    assert result["kills"]["bit_identical"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_die_at_every_point_and_no_bit_shows_it(small, tmp_path):
    rows = open_chaos_rows(tmp_path / "rows.jsonl", "this")

    result = measure_chaos(replace(small, windows=()), rows, tmp_path / "cache", quick=True)

    kills = result["kills"]
    assert (kills["count"], set(kills["by_point"])) == (5, set(POINTS))
    assert kills["bit_identical"] is True
    assert (kills["samples_lost"], kills["samples_doubled"], kills["false_accusations"]) == (0, 0, 0)
    assert [row["noticed_s"] > 0 for row in result["rows"]] == [True] * 5
    again = measure_chaos(replace(small, windows=()), rows, tmp_path / "cache", quick=True, only_finished=True)
    assert again["kills"] == kills


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_arms_go_on_although_workers_die(small, tmp_path):
    result = measure_chaos(
        replace(small, runs=0), open_chaos_rows(tmp_path / "rows.jsonl", "this"), tmp_path / "cache", quick=True
    )

    rows = [row for row in result["rows"] if row["what"] == "goodput"]
    assert [row["arm"] for row in rows] == list(ARMS)
    assert all(row["survived"] and row["failures"] + row["failures_without_a_victim"] == 2 for row in rows)
    assert all(row["step_s_undisturbed"] > 0 for row in rows)
    assert rows[0]["failures"] == 2
    assert rows[0]["share"] > 0
