"""docs/serving_stages.md: every figure of its table is the raw result's."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving_stages.md").read_text(encoding="utf-8")
RESULT = json.loads((ROOT / "benchmarks" / "results" / "served-stages-cpu-2cores-busy.json").read_text("utf-8"))
ROWS = RESULT["rows"]


def line(row):
    rate = "-" if row["check_rate"] is None else f"{100 * row['check_rate']:.0f} %"
    cells = (row["arm"], rate, row["streams"], f"{row['cpu_ms_per_token']:.0f} ms")
    return f"| {' | '.join(map(str, cells))} | {row['bytes_per_token'] / 1000:.0f} kB | {row['tokens_per_s']:.2f} |"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['arm']}-{row['check_rate']}-{row['streams']}")
def test_every_line_of_the_table_is_the_raw_results(row):
    assert line(row) in PAGE


def test_texts_in_stages_were_those_of_one_process_and_nobody_was_accused():
    in_stages = [row for row in ROWS if row["arm"] == "in stages"]

    assert {row["texts_like_one_process"] for row in in_stages} == {1.0}
    assert {row["convicted"] for row in in_stages} == {0}
    worst = max(row["worst_distance"] for row in in_stages if row["check_rate"])
    assert f"the largest distance of an honest piece was {worst:.1e}" in PAGE
