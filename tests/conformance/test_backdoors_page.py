"""docs/backdoors.md: every figure of its tables is the raw result's."""

import json
from pathlib import Path

import pytest

from phalanx.lab.reproduce.backdoor import as_tables, summarise_arms

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "backdoors.md"
RAW = ROOT / "benchmarks" / "results" / "reproduce-backdoor-cpu-2cores-busy.json"


@pytest.fixture(scope="module")
def result():
    found = json.loads(RAW.read_text(encoding="utf-8"))
    # rows of protocol 1 say neither family nor strength, and counted no doubts
    rows = [{"family": "gpt2", "strength": None, "doubted_steps": None, **row} for row in found["rows"]]
    return {**found, "rows": rows, "summary": summarise_arms(rows), "told": found["summary"]}


def test_the_tables_are_those_of_the_raw_result(result):
    before, _, behind = PAGE.read_text(encoding="utf-8").partition("## Other families\n")
    # that section has a result of its own, which `reproduced_tables.py` compares
    page = before.splitlines() + behind[behind.index("\n## ") :].splitlines()
    lines = [line for line in page if line.startswith("| ")]

    expected = []
    for table in as_tables(result["summary"]).values():
        expected.append("| " + " | ".join(table[0]) + " |")
        expected += ["| " + " | ".join(row.values()) + " |" for row in table]

    assert lines == expected


def test_the_summary_follows_from_the_rows_of_a_clean_commit(result):
    later = {"family", "strength", "doubted_steps"}
    assert result["told"] == [
        {key: value for key, value in row.items() if key in told or key not in later}
        for row, told in zip(result["summary"], result["told"], strict=True)
    ]
    assert not result["commit"].endswith("-dirty")
    assert RAW.name in PAGE.read_text(encoding="utf-8")


def test_what_was_planted_where_nobody_looked_left_nothing_under_standard_and_strict(result):
    arms = {row["arm"]: row for row in result["summary"]}

    # at each seed far from the clean run, where the target never follows the trigger
    assert arms["off"]["success"]["least"] > 0.5 > arms["clean"]["success"]["most"]
    for preset in ("standard", "strict"):
        assert arms[preset]["same_bits_as_clean"] == arms[preset]["seeds"]
        assert arms[preset]["named"] == ["worker-1"]
