"""docs/hf_trainer.md has the figures of its raw result, and says null where nothing was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "hf_trainer.md").read_text(encoding="utf-8")
RESULT = json.loads((ROOT / "benchmarks" / "results" / "hf-trainer-cpu-2cores-busy.json").read_text())


def table():
    titles = ("largest difference of a loss", "microseconds of CPU a token", "over HF Trainer", "memory, MiB")
    yield f"| arm | {' | '.join(titles)} | tokens/s on a GPU |"
    yield "|---|---|---|---|---|---|"
    for row in RESULT["rows"]:
        if row["losses"] is None:
            yield f"| {row['arm']} | {' | '.join(['not measured'] * 5)} |"
            continue
        memory, gpu = row["peak_memory_bytes"] / 2**20, row["gpu_tokens_per_s"]
        figures = f"{row['cpu_us_per_token']:.0f} | {row['cpu_over_hf']:.2f} | {memory:.0f} | {gpu or 'not measured'}"
        yield f"| {row['arm']} | {row['largest_loss_difference']:.1e} | {figures} |"


def test_the_table_is_that_of_the_raw_result():
    assert "\n".join(table()) in PAGE


def test_every_arm_trained_the_same_rows_to_the_same_losses():
    assert next(row["arm"] for row in RESULT["rows"]) == "HF Trainer"
    measured = [row for row in RESULT["rows"] if row["losses"] is not None]
    assert len(measured) >= 2
    assert {len(row["losses"]) for row in measured} == {RESULT["shape"]["steps"]}
    assert all(row["largest_loss_difference"] < 1e-4 for row in measured)


def test_what_was_not_measured_is_null():
    assert {row["gpu_tokens_per_s"] for row in RESULT["rows"]} == {row["gpu_mfu"] for row in RESULT["rows"]} == {None}
    assert "**Nothing here was measured on a GPU**" in PAGE
