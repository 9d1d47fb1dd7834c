"""Cells and tables of a backdoor: the first family, an attacker who is tuned against the screen, other families."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from phalanx.lab.reproduce.backdoor import (
    SCREEN,
    SIZES,
    STRENGTHS,
    BackdoorCell,
    BackdoorLab,
    BackdoorSize,
    TrainingSize,
    as_tables,
    backdoor_cells,
    describe_backdoor_size,
    guard_findings,
    summarise_arms,
)
from phalanx.lab.reproduce.removal import REMOVALS
from phalanx.lab.reproduce.workload import FAMILIES, PACKAGED
from phalanx.models import ModelConfig
from tiny_edge_models import write_model

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def row(cell, **changes):
    trained = {
        "named": [],
        "found_in_step": None,
        "back_to_step": None,
        "lies_kept": 60,
        "doubted_steps": 0,
        "weights_digest": f"{cell.family}-{cell.arm}",
    }
    quality = {"perplexity": 60.0, "success": 0.5, "success_without_trigger": 0.05}
    return {**asdict(cell), **quality, **({} if cell.arm in REMOVALS else trained), **changes}


def test_the_full_size_has_three_seeds_every_family_and_falling_strengths():
    cells = backdoor_cells(SIZES["full"])

    assert len(cells) == len(set(cells))
    assert {cell.seed for cell in cells if (cell.family, cell.strength) == ("gpt2", None)} == {0, 1, 2}
    assert {cell.family for cell in cells} == {*FAMILIES, PACKAGED}
    assert [cell.strength for cell in cells if cell.arm == SCREEN and cell.seed == 0] == list(STRENGTHS)
    # a removal from a tuned model begins with one that was tuned
    assert all(cell.strength in STRENGTHS for cell in cells if cell.arm in REMOVALS and cell.strength is not None)


def test_the_quick_size_is_the_first_table_alone():
    assert {(cell.family, cell.strength, cell.seed) for cell in backdoor_cells(SIZES["quick"])} == {("gpt2", None, 0)}


def test_each_question_has_a_table_of_its_own():
    cells = [
        BackdoorCell("clean", 0),
        BackdoorCell("off", 0),
        BackdoorCell("fine_tuned", 0),
        BackdoorCell(SCREEN, 0, strength=0.1),
        BackdoorCell("fine_tuned", 0, strength=0.1),
        BackdoorCell("clean", 0, "opt"),
        BackdoorCell("standard", 0, "opt"),
    ]
    rows = [row(cell) for cell in cells]
    rows[3] |= {"doubted_steps": 3, "named": ["worker-1"], "found_in_step": 4}

    tables = as_tables(summarise_arms(rows))

    assert {title: len(lines) for title, lines in tables.items()} == {
        "planted": 2,
        "removed from the model of arm off": 3,
        "tuned against the screen": 2,
        "other families": 2,
    }
    tuned, removed = tables["tuned against the screen"]
    assert (tuned["strength"], tuned["steps in doubt"], tuned["found in step"]) == ("0.1", "3", "4")
    assert (removed["arm"], removed["steps in doubt"]) == ("fine_tuned", "-")
    # bits are compared within a family
    assert summarise_arms(rows)[-1]["same_bits_as_clean"] == 0


@pytest.mark.parametrize("events", [[], [("gradient_doubted", {"stage": 1}), ("gradient_doubted", {"stage": 1})]])
def test_doubts_about_gradients_are_counted(events):
    assert guard_findings(events, [0, 1])["doubted_steps"] == len(events)


def test_a_row_of_before_keeps_what_decides_it():
    measured = json.loads((RESULTS / "reproduce-backdoor-avx2-cpu-2cores-busy.json").read_text(encoding="utf-8"))

    assert [describe_backdoor_size(SIZES["full"], family) for family in FAMILIES] == 3 * [measured["protocol"]]
    assert describe_backdoor_size(SIZES["full"], PACKAGED) != measured["protocol"]


def test_a_model_that_others_have_pre_trained_is_poisoned_guarded_and_cleaned(tmp_path):
    sizes = {"num_hidden_layers": 5, "tie_word_embeddings": True, "initializer_range": 0.02}
    model = ModelConfig(path=str(write_model(tmp_path / "model", **sizes)))
    training = TrainingSize(8, (1, 2, 1, 1), microbatches=2, batch_size=4, sequence_length=16, held_out=6)
    lab = BackdoorLab(BackdoorSize(60, (0,), packaged=training), tmp_path / "cache", model)

    arms = ("clean", "off", "strict", "pruned", "guilty_stage_reset")
    clean, off, strict, pruned, reset = (lab(BackdoorCell(arm, 0, PACKAGED)) for arm in arms)

    assert off["weights_digest"] != clean["weights_digest"] == strict["weights_digest"]
    assert (off["attacked_steps"], off["named"], strict["named"]) == (8, [], ["worker-1"])
    assert len({row["perplexity"] for row in (off, pruned, reset)}) == 3
    assert {row["sequences"] for row in (clean, off, pruned, reset)} == {6}
