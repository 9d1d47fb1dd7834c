"""Means, intervals, paired differences; what is missing is said and never made up."""

import pytest

from phalanx.data.tasks import Example, LabelledExamples
from phalanx.lab.reproduce import medical
from phalanx.lab.reproduce.medical import reproduce_medical
from phalanx.lab.reproduce.medical.arms import ARMS
from phalanx.lab.reproduce.medical.cell import LATE, MedicalCell, cells_of, not_measured
from phalanx.lab.reproduce.medical.size import SIZES, describe_medical_size
from phalanx.lab.reproduce.medical.summary import as_tables, compare_arms, half_width, summarise_medical


def row(arm, seed, accuracy, digest="aa", losses="bb", task="icd10"):
    return {
        "task": task,
        "seed": seed,
        "arm": arm,
        "accuracy": accuracy,
        "macro_f1": accuracy / 2,
        "majority": 0.1,
        "cpu_s": 1.0,
        "weights_digest": digest,
        "losses_digest": losses,
    }


def test_the_interval_is_students():
    # mean 0.8, standard deviation 0.1, t(2) = 4.303
    assert half_width([0.7, 0.8, 0.9]) == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert half_width([0.8]) is None
    assert half_width([]) is None


def test_a_summary_has_a_line_for_each_task_and_arm():
    rows = [row("fedavg", 0, 0.7), row("fedavg", 1, 0.9), row("local", 0, 0.5)]

    first, second = summarise_medical(rows)

    assert (first["accuracy"], first["seeds"]) == (pytest.approx(0.8), 2)
    assert first["accuracy_half_width"] == pytest.approx(12.706 * 0.2 / 2**0.5 / 2**0.5)
    assert (second["accuracy"], second["accuracy_half_width"]) == (0.5, None)


def test_what_was_not_measured_stays_empty():
    rows = [not_measured(MedicalCell("icd10", 0, "split_masked"), "no masks here"), row("fedavg", 0, 0.7)]

    empty, _ = summarise_medical(rows)

    assert (empty["accuracy"], empty["seeds"], empty["note"]) == (None, 0, "no masks here")
    assert as_tables([empty])["icd10"][0]["accuracy"] == "-"
    assert compare_arms(rows) == []


def test_differences_are_paired_by_seed():
    rows = [row("fedavg", seed, value) for seed, value in enumerate((0.70, 0.80, 0.90))]
    rows += [row("split_sealed", seed, value, digest="cc") for seed, value in enumerate((0.72, 0.81, 0.93))]

    (found,) = compare_arms(rows)

    assert (found["arm"], found["against"], found["seeds"]) == ("split_sealed", "fedavg", 3)
    assert found["difference"] == pytest.approx(0.02)
    assert found["at_least"]
    assert not found["beyond_interval"]
    assert found["same_bits"] == 0


def test_a_sealed_split_below_fedavg_is_said_to_be_below():
    (found,) = compare_arms([row("fedavg", 0, 0.8), row("split_sealed", 0, 0.7)])

    assert not found["at_least"]
    assert found["beyond_interval"] is None


def test_bits_are_the_same_only_if_weights_and_losses_are():
    rows = [row("split_plain", seed, 0.8) for seed in range(3)]
    rows += [row("split_sealed", 0, 0.8), row("split_sealed", 1, 0.8, losses="xx"), row("split_sealed", 2, 0.8, "xx")]

    (found,) = compare_arms(rows)

    assert found["same_bits"] == 1


def test_three_tasks_are_finished_before_others_begin_and_their_late_arms_are_last():
    size = SIZES["full"]
    cells = cells_of(size, size.tasks)

    assert len(cells) == len(set(cells)) == len(size.tasks) * 3 * len(ARMS)
    assert len(size.tasks) >= 3
    half = len(cells) // 2
    assert {cell.task for cell in cells[:half]} == set(size.tasks[:3])
    late = [(cell.seed, cell.arm) for cell in cells[half - 18 : half]]
    assert late == [(seed, arm) for seed in range(3) for arm in LATE for _ in range(3)]
    assert all(cell.arm not in LATE for cell in cells[: half - 18])


def test_which_tasks_are_done_does_not_make_older_rows_unknown():
    assert "tasks" not in describe_medical_size(SIZES["full"])
    assert describe_medical_size(SIZES["full"]) != describe_medical_size(SIZES["quick"])


def test_a_task_without_its_data_is_absent_and_the_others_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setenv("PHALANX_DATA", str(tmp_path))
    task = LabelledExamples(("a", "b"), (Example("x", 0), Example("y", 1)))
    monkeypatch.setattr(medical, "load_tasks", lambda size, home: ({"medquad": task}, {"icd10": "is not installed"}))

    found = reproduce_medical(size="quick", only_finished=True)

    assert found["absent"] == {"icd10": "is not installed"}
    assert found["missing"] > 0
    assert all(row["accuracy"] is None for row in found["rows"])
    assert found["tasks"]["medquad"]["texts"] == 2
