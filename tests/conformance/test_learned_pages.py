"""docs/erasure.md and docs/data_rules.md: figures of unlearning and of the learned score are those of raw results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
UNLEARNING, SCORES = "unlearning-cpu-2cores-busy.json", "text-classifier-cpu-2cores-busy.json"


def read_rows(name: str, part: str | None = None) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if part is None or row["part"] == part]


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def unlearning() -> Iterator[str]:
    for row in read_rows(UNLEARNING):
        yield line(
            row["seed"],
            row["arm"],
            f"{row['document_loss']:.2f}",
            f"{row['document_likeliest']:.0%}",
            f"{row['retained_loss']:.2f}",
            f"{row['half_loss']:.2f}, {row['relearned_half_loss']:.2f}",
            f"{row['gain']:.2f}",
            f"{row['never_seen_gain_mean']:.2f}, {row['never_seen_gain_max']:.2f}",
            f"{row['p']:.2f}",
        )


def ablation() -> Iterator[str]:
    differences = {(row["seed"], row["arm"]): row for row in read_rows(SCORES, "difference")}
    for row in read_rows(SCORES, "ablation"):
        difference = differences.get((row["seed"], row["arm"]))
        shown = "-"
        if difference is not None:
            shown = "{difference:+.3f} ({low:+.3f} to {high:+.3f})".format_map(difference)
        yield line(
            row["seed"],
            f"{row['arm']} scores" if difference else row["arm"],
            f"{row['clean_share']:.0%}",
            f"{row['loss']:.3f}",
            shown,
        )


def harm() -> Iterator[str]:
    for row in read_rows(SCORES, "harm"):
        shares = [
            f"{row[name]:.1%} ({row[f'{name}_interval'][0]:.1%} to {row[f'{name}_interval'][1]:.1%})"
            for name in ("missed", "false_alarms")
        ]
        area = "-" if row["area"] is None else f"{row['area']:.3f}"
        counts = f"{row['harmful']}, {row['harmless']}"
        yield line(row["texts"], row["method"], counts, area, *shares)


TABLES = {
    "unlearning": (unlearning, "erasure.md"),
    "ablation": (ablation, "data_rules.md"),
    "harm": (harm, "data_rules.md"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_raw_result(name: str) -> None:
    make_lines, page = TABLES[name]
    expected = list(make_lines())

    assert expected
    assert "\n".join(expected) + "\n" in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_relearning_finds_what_was_unlearned_and_nothing_of_what_was_erased() -> None:
    for row in read_rows(UNLEARNING):
        if row["arm"] == "before":
            assert row["document_likeliest"] > 0.95
        elif row["arm"] == "unlearned":
            assert row["document_likeliest"] < 0.5
            assert row["is_hidden"]
        else:
            assert not row["is_hidden"]


def test_highest_scores_make_a_better_model_than_chance_and_lowest_a_worse_one() -> None:
    for row in read_rows(SCORES, "difference"):
        if row["arm"] == "highest":
            assert row["high"] < 0
        else:
            assert row["low"] > 0
