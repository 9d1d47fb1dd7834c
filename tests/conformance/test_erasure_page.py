"""docs/erasure.md: the figures of unlearning are those of the raw result."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
UNLEARNING = "unlearning-cpu-2cores-busy.json"


def read_rows(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"])


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


def test_the_table_is_that_of_the_raw_result() -> None:
    expected = list(unlearning())

    assert expected
    assert "\n".join(expected) + "\n" in (ROOT / "docs" / "erasure.md").read_text(encoding="utf-8")


def test_the_erased_models_gain_nothing_and_one_unlearned_one_is_found() -> None:
    rows = {(row["seed"], row["arm"]): row for row in read_rows(UNLEARNING)}
    unlearned = [rows[seed, "unlearned"] for seed in range(3)]

    assert all(rows[seed, "erased"]["gain"] == 0.0 for seed in range(3))
    assert all(row["document_loss"] >= rows[row["seed"], "before"]["never_seen_loss"] for row in unlearned)
    assert [row["is_hidden"] for row in unlearned] == [row["p"] < 0.05 for row in unlearned]
    assert [row["gain"] > row["never_seen_gain_max"] for row in unlearned] == [False, True, False]
    assert [row["gain"] < row["never_seen_gain_mean"] for row in unlearned] == [False, False, True]
    assert {row["num_never_seen"] for row in unlearned} == {24}
