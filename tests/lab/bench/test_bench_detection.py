"""The detection bench: it plays every attack of the table, and its figures say what really happened."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from phalanx.lab.attacks import ATTACKS
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.detection.cells import PRESET_STEPS, needs_two
from phalanx.lab.bench.detection.cells import detection_cells as all_cells
from phalanx.lab.bench.detection.detection import (
    detection_row,
    false_accusations_per_million,
    measure_detection,
    open_detection_rows,
)
from phalanx.lab.bench.detection.simulated_run import (
    CleanRun,
    CompanyResult,
    LoggedLie,
    accepted_lies,
    is_found,
    is_undone,
    num_sequences,
    play_company,
)

KEYS = {
    *("attack", "direction", "rate", "stages", "attacked_steps", "detected_steps", "steps_to_detection"),
    *("corrupted_sequences_accepted", "guilty", "blamed", "false_accusations", "loss_distance"),
    *("mode", "q", "p", "bit_identical", "lost", "caught_by"),
}


cells = cache(all_cells)
"""Thousands of run files are made and checked for it."""


def cell_of(kind, guard="standard"):
    """The first cell with this attack and guard."""
    return next(cell for cell in cells(quick=True) if (cell.run.attack.kind, cell.guard) == (kind, guard))


def lie(step, party="worker-1", microbatch=0, what=None):
    return LoggedLie(party, 1, step, microbatch, what)


def evicted(party, step, undone_from=None):
    """What the audit log says about a conviction."""
    events = [
        ("verdict", {"party": party, "step": step, "offence": "message"}),
        ("evicted", {"party": party, "step": step}),
    ]
    return events if undone_from is None else [*events, ("rolled_back", {"step": step, "to": undone_from})]


def row(outcome, kind="sign_flip"):
    return detection_row(cell_of(kind), outcome, CleanRun([1.0] * 64, ["clean"] * 64))


@pytest.mark.parametrize("quick", [True, False])
def test_every_attack_of_the_table_is_played_in_every_direction(quick):
    played = {(cell.run.attack.kind, cell.run.attack.direction) for cell in cells(quick=quick)}

    assert {kind for kind, _ in played} == {*ATTACKS, "none"}
    for kind, line in ATTACKS.items():
        directions = {None} if line.direction is None or line.fixed else {"forward", "backward"}
        assert {direction for name, direction in played if name == kind} == directions


@pytest.mark.parametrize("preset", PRESET_STEPS)
def test_the_long_bench_has_every_rate_and_every_place_for_every_preset(preset):
    watched = [cell for cell in cells(quick=False) if cell.guard == preset and cell.run.attack.kind != "none"]
    places = {
        together: {
            (c.run.pipeline.stages, c.run.attack.stages) for c in watched if needs_two(c.run.attack.kind) is together
        }
        for together in (False, True)
    }

    assert {cell.run.attack.kind for cell in watched} == {*ATTACKS}
    assert {cell.run.attack.rate for cell in watched} == {0.3, 0.5, 0.7, 1.0}
    assert places[False] == {(4, (1,)), (4, (2,)), (6, (1,)), (6, (2,)), (6, (3,)), (6, (4,))}
    assert places[True] >= {(6, (2, 3)), (6, (1, 4))}


def test_what_answers_most_is_played_first():
    played = cells(quick=False)
    kinds = [cell.run.attack.kind for cell in played if cell.guard == "standard"]
    first = {kind: kinds.index(kind) for kind in kinds}
    last = {kind: len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
    papers = ("forward_sign_flip", "backward_gaussian")
    guards = [cell.guard for cell in played if cell.run.attack.kind != "none"]

    assert {cell.run.attack.kind for cell in played[: len(played) - len(guards)]} == {"none"}
    assert last["none"] < first["forward_sign_flip"]
    assert max(last[kind] for kind in papers) < first["drift"]
    assert last["lazy_int8"] < min(first[kind] for kind in ("equivocation", "framing", "league", "colluders"))
    assert max(last[kind] for kind in ("equivocation", "framing", "league", "colluders")) < first["zero"]
    assert list(dict.fromkeys(guards))[:4] == ["standard", "watchful", "strict", "light"]


def test_the_smallest_lies_are_told_among_other_roundings_too():
    played = [cell for cell in cells(quick=True) if cell.paths and cell.run.attack.kind != "none"]

    assert {(cell.run.attack.kind, cell.run.attack.strength) for cell in played} == {
        ("drift", 1e-4),
        ("lazy_int8", None),
    }


def test_lies_in_messages_are_shown_to_the_baselines_too():
    guards = {cell.guard for cell in cells(quick=True) if cell.run.attack.kind == "backward_gaussian"}

    assert guards == {"standard", "off"}


def test_a_lie_before_its_author_was_found_is_in_the_weights_for_good():
    outcome = CompanyResult(losses=[1.0] * 6, lies=[lie(2), lie(4)], events=evicted("worker-1", 4))

    assert accepted_lies(outcome) == [lie(2)]
    assert [is_found(one, outcome) for one in outcome.lies] == [False, True]
    assert row(outcome)["corrupted_sequences_accepted"] == 2
    assert (row(outcome)["detected_steps"], row(outcome)["steps_to_detection"]) == (1, 2)


def test_the_step_of_a_second_conviction_that_was_gone_back_to_is_not_when_the_guard_met_them():
    events = [*evicted("worker-1", 9, undone_from=3), *evicted("worker-2", 3)]
    outcome = CompanyResult(losses=[1.0] * 12, lies=[lie(2), lie(3), lie(3, "worker-2"), lie(9)], events=events)

    assert row(outcome)["steps_to_detection"] == 7


def test_a_lie_that_was_undone_is_not_in_the_weights():
    outcome = CompanyResult(
        losses=[1.0] * 6, lies=[lie(1), lie(3), lie(4)], events=evicted("worker-1", 4, undone_from=3)
    )

    assert accepted_lies(outcome) == [lie(1)]
    assert [is_undone(one, outcome) for one in outcome.lies] == [False, True, False]


def test_a_rollback_for_one_liar_does_not_excuse_another():
    lies = [lie(2), lie(2, "worker-2")]
    outcome = CompanyResult(losses=[1.0] * 6, lies=lies, events=evicted("worker-1", 4, undone_from=2))

    assert accepted_lies(outcome) == [lies[1]]


def test_a_lie_in_a_step_that_was_never_applied_corrupts_nothing():
    outcome = CompanyResult(losses=[1.0] * 3, lies=[lie(3)], error="it broke off")

    assert accepted_lies(outcome) == []
    assert row(outcome)["bit_identical"] is None


def test_sequences_are_counted_once_and_a_lie_about_a_step_counts_all():
    run = cell_of("sign_flip").run

    assert num_sequences([lie(2), lie(2), lie(2, microbatch=1)], run) == 4
    assert num_sequences([lie(2, microbatch=None)], run) == run.train.batch_size


def test_whoever_is_blamed_and_told_no_lie_was_accused_falsely():
    outcome = CompanyResult(losses=[1.0] * 6, lies=[lie(2)], events=evicted("worker-2", 2))

    found = row(outcome)

    assert (found["guilty"], found["blamed"], found["false_accusations"]) == (["worker-1"], ["worker-2"], 1)
    assert found["detected_steps"] == 0


def test_who_is_replaced_for_silence_is_not_blamed():
    outcome = CompanyResult(
        losses=[1.0] * 6, lies=[lie(2, what="stall")], events=[("lost", {"party": "worker-1", "step": 2})]
    )

    found = row(outcome)

    assert (found["lost"], found["blamed"], found["detected_steps"]) == (["worker-1"], [], 1)
    assert found["corrupted_sequences_accepted"] == 0


def test_what_was_withheld_and_handed_on_was_found_in_the_step_in_which_it_was() -> None:
    lies = [lie(2, what="withholding"), lie(3, what="withholding")]
    events = [("relayed", {"to": "worker-2", "what": "tensor", "source": 1, "step": 3})]
    outcome = CompanyResult(losses=[1.0] * 6, lies=lies, events=events)

    assert [is_found(one, outcome) for one in lies] == [False, True]
    assert (row(outcome)["detected_steps"], row(outcome)["blamed"], row(outcome)["relayed"]) == (1, [], 1)


def test_no_company_waits_long_for_the_silent() -> None:
    silent = [cell for cell in cells(quick=True) if cell.run.attack.kind in ("withholding", "stall")]

    assert {cell.steps for cell in silent} == {8}


def test_the_loss_is_compared_in_steps_that_were_not_undone():
    outcome = CompanyResult(losses=[1.0, 1.5, 3.0, 1.25], events=evicted("worker-1", 3, undone_from=2))

    assert row(outcome)["loss_distance"] == 0.5


def test_false_accusations_are_counted_by_audited_messages():
    rows = [
        {"attack": "none", "audited_messages": 1_500, "false_accusations": 0, "paths": ["a", "b"]},
        {"attack": "drift", "audited_messages": 500, "false_accusations": 1, "paths": []},
        {"attack": "drift", "audited_messages": None, "false_accusations": 1, "paths": []},
    ]
    for one in rows:
        one["compared_by_distance"] = 700 if one["paths"] else None

    assert false_accusations_per_million(rows)["value"] == 500
    assert false_accusations_per_million(rows)["audited_messages_of_honest_companies"] == 1_500
    assert false_accusations_per_million(rows)["of_them_by_paths"] == {"a / b": 1_500}
    assert false_accusations_per_million(rows)["of_them_compared_by_distance"] == 700
    assert false_accusations_per_million(rows[2:])["value"] is None


def test_the_bench_shows_the_guard_winning_and_the_attack_winning_without_it(tmp_path: Path):
    what = [replace(cell_of("forward_sign_flip", guard), steps=4) for guard in ("standard", "off")]

    result = json.loads(
        json.dumps(measure_detection(what, open_detection_rows(tmp_path / "rows.jsonl", "this"), quick=True))
    )

    guarded, unguarded = result["rows"]
    assert "detection" in BENCHES
    assert guarded.keys() == unguarded.keys() >= KEYS
    assert guarded["attacked_steps"] == guarded["detected_steps"] == 1
    assert guarded["guilty"] == guarded["blamed"] == ["worker-1"]
    assert (guarded["bit_identical"], guarded["corrupted_sequences_accepted"]) == (True, 0)
    assert guarded["loss_distance"] == 0
    assert unguarded["detected_steps"] == 0
    assert unguarded["corrupted_sequences_accepted"] == unguarded["attacked_steps"] * 16 > 0
    assert unguarded["bit_identical"] is False
    assert unguarded["loss_distance"] > 0
    assert result["false_accusations_per_million"]["value"] == 0
    assert result["missing"] == 0


@pytest.mark.slow
def test_a_row_can_be_had_again(tmp_path: Path):
    cell = replace(cell_of("one_token", "standard"), steps=3)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found.append(play_company(cell, tmp_path / name, tmp_path / "models"))

    assert found[0].lies == found[1].lies
    assert [e for e in found[0].events if e[0] == "evicted"] == [e for e in found[1].events if e[0] == "evicted"]
    assert found[0].digest == found[1].digest
