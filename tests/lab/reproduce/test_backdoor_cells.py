"""Cells and tables of a backdoor: the first family, an attacker who is tuned against the screen, other families."""

from dataclasses import asdict

import pytest

from phalanx.lab.reproduce.backdoor import (
    SCREEN,
    SIZES,
    STRENGTHS,
    BackdoorCell,
    as_tables,
    backdoor_cells,
    guard_findings,
    summarise_arms,
)
from phalanx.lab.reproduce.removal import REMOVALS
from phalanx.lab.reproduce.workload import FAMILIES


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
    assert {cell.family for cell in cells} == set(FAMILIES)
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
