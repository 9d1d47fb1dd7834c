"""The page on the HF Trainer has the figures of its raw result, and says what was not measured."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "hf-trainer-cpu-2cores-busy.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "hf_trainer.md").read_text(encoding="utf-8")
MIB = 2**20


def cell(value, form, per=1):
    return "not measured" if value is None else form.format(value / per)


def table_row(row):
    name = row["arm"][0].upper() + row["arm"][1:]
    cells = [
        cell(row["losses"] and row["losses"][-1], "{:.5f}"),
        cell(row["largest_loss_difference"], "{:.1e}"),
        cell(row["cpu_us_per_token"], "{:.0f}"),
        cell(row["cpu_over_hf"], "{:.2f}"),
        cell(row["peak_memory_bytes"], "{:.0f}", MIB),
        cell(row["gpu_tokens_per_s"], "{:.0f}"),
        cell(row["gpu_mfu"], "{:.2f}"),
    ]
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["arm"])
def test_a_row_of_the_page_is_that_of_the_raw_result(row):
    assert table_row(row) in PAGE.splitlines()


def test_the_page_has_no_other_row_and_names_the_shape_of_what_was_trained():
    shape = RESULT["shape"]
    words = " ".join(PAGE.split())

    assert sum(line.startswith(("| HF Trainer |", "| Phalanx,")) for line in PAGE.splitlines()) == len(RESULT["rows"])
    assert f"GPT-2 of {shape['n_layer']} layers and width {shape['n_embd']}, {shape['rows_a_step']} rows" in words
    assert (
        f"{shape['tokens_a_row']} tokens a step in {shape['microbatches']} microbatches, {shape['steps']} steps"
        in words
    )


def test_equal_rows_have_equal_losses_but_for_rounding():
    measured = [row for row in RESULT["rows"] if row["losses"] is not None]

    assert len(measured) >= 3 and {len(row["losses"]) for row in measured} == {RESULT["shape"]["steps"]}
    assert all(row["largest_loss_difference"] < 1e-5 for row in measured)


def test_the_result_was_taken_from_a_commit_without_changes():
    assert len(RESULT["commit"]) == 40
