"""The curve on the page of reinforcement is that of the committed run, of the example as it is."""

import json
import re
from pathlib import Path

import pytest

from phalanx.train import load_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reinforcement.md").read_text(encoding="utf-8")
ROWS = [
    row
    for name in ("rollouts-cpu-2cores-busy", "rollouts-ppo-cpu-2cores-busy")
    for row in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_the_curve_is_that_of_the_raw_result(row):
    table = re.search(rf"^\| steps \| (.+) \|\n\|[-|]+\|\n\| `{row['run']}`, .+? \| (.+) \|$", PAGE, re.M)
    steps, written = (cells.split(" | ") for cells in table.groups())
    measured = dict(map(tuple, row["held_out"]))

    assert written == [f"{100 * measured[int(step)]:.0f} %" for step in steps]
    assert f"from nothing to {100 * row['last_held_out']:.0f} %" in PAGE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_the_example_learns_its_task_from_under_a_fifth_to_over_nine_tenths(row, monkeypatch):
    monkeypatch.chdir(ROOT)

    run = load_run(ROOT / "examples" / row["run"])

    assert (run.train.objective_kind, run.train.steps) == (row["objective"], row["steps"])
    assert row["first_sampled"] < 0.2
    assert row["last_held_out"] > 0.9
