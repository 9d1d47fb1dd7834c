"""A sweep that was interrupted goes on; a row is used again only for the very same training."""

import json
from dataclasses import replace

import pytest

from phalanx.errors import DataError
from phalanx.lab.bench.measure.row_file import sweep_cells
from phalanx.lab.reproduce import reproduce
from phalanx.lab.reproduce.cell import TableCell
from phalanx.lab.reproduce.tables import CELLS, as_tables, rows_with_clean_text, summarise_cells
from phalanx.lab.reproduce.trainer import open_table_rows
from phalanx.lab.reproduce.workload import PACKAGED, SIZES, SMALL, describe_table_size

FULL, LEARNED, QUICK = SIZES["full"], SIZES["learned"], SIZES["quick"]
CLEAN = TableCell("gpt2", "manual", "plain", 0, "clean")
ATTACKED = TableCell("gpt2", "manual", "plain", 0, "attacked", "forward", 0.5)


def made_row(cell, best=80.0, last=82.0, digest="aa", **changes):
    return {
        **vars(cell),
        "status": "completed",
        "steps": 10,
        "perplexity_best": best,
        "perplexity_last": last,
        "weights_digest": digest,
        "attacked_steps": 0,
        "dropped_steps": 0,
        "redone_steps": 0,
        "lies": 0,
        "lies_missed": None,
        "alarms": None,
        "honest_accused": None,
        "evicted": [],
        "wall_s": 1.0,
        **changes,
    }


class Trainer:
    def __init__(self, dies_at=None):
        self.trained = []
        self.dies_at = dies_at

    def __call__(self, cell):
        if cell == self.dies_at:
            raise KeyboardInterrupt
        self.trained.append(cell)
        return made_row(cell)


def run(path, train, cells=(CLEAN, ATTACKED), size=QUICK):
    return list(sweep_cells(cells, open_table_rows(path, size), train, lambda *told: None))


def test_an_interrupted_sweep_trains_only_what_is_missing(tmp_path):
    path, first, second = tmp_path / "rows.jsonl", Trainer(dies_at=ATTACKED), Trainer()

    with pytest.raises(KeyboardInterrupt):
        run(path, first)
    rows = run(path, second)

    assert first.trained == [CLEAN]
    assert second.trained == [ATTACKED]
    assert [row["arm"] for row in rows] == ["clean", "attacked"]
    assert rows == run(path, None)


def test_a_line_that_was_being_written_is_trained_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, Trainer())
    path.write_text(path.read_text()[:-20])

    again = Trainer()
    rows = run(path, again)

    assert again.trained == [ATTACKED]
    # what was half written is gone, so that the row behind it can be read
    assert run(path, None) == rows


def test_a_broken_line_in_the_middle_is_refused_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, Trainer())
    path.write_text("{\n" + path.read_text())

    with pytest.raises(DataError, match=r"rows.jsonl, line 1: is not JSON"):
        run(path, None)


def test_a_row_of_another_size_is_not_used(tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, Trainer(), size=QUICK)

    full = Trainer()
    run(path, full, size=FULL)

    assert full.trained == [CLEAN, ATTACKED]


def test_a_small_row_is_not_taken_for_a_full_one(tmp_path):
    rows = [open_table_rows(tmp_path / "rows.jsonl", size) for size in SIZES.values()]

    assert len({one.cell_key(CLEAN) for one in rows}) == len(SIZES)


def test_what_decides_older_rows_has_no_field_that_came_later():
    assert describe_table_size(SMALL)["size"] == {
        "pretraining_steps": 800,
        "pretraining_characters": 1_000_000,
        "text_share": 0.15,
        "width": 64,
        "microbatches": 2,
        "validation_sequences": 64,
        "lr_share": 2.0,
    }
    assert set(describe_table_size(SMALL)) == {
        *("stages", "batch_size", "microbatches", "sequence_length", "vocab_size", "families", "regimes", "size")
    }
    assert describe_table_size(SMALL)["families"]["opt"]["hidden_size"] == SMALL.width == 64
    assert describe_table_size(SMALL)["microbatches"] == 2


@pytest.mark.parametrize("table", CELLS)
def test_the_undefended_and_our_arm_come_first_in_all_places(table):
    cells = list(CELLS[table](LEARNED))
    first = [cell for cell in cells if cell.arm in ("clean", "attacked", "phalanx") and cell.regime != "overfit"]
    first_seed = [cell for cell in first if cell.seed == 0]

    assert cells[: len(first)] == first
    assert cells[: len(first_seed)] == first_seed
    assert {(cell.family, cell.domain) for cell in first_seed} == {(cell.family, cell.domain) for cell in cells}
    assert (first[0].family, first[0].domain) == ("gpt2", "wikitext")


def test_without_a_trainer_only_what_is_there_is_shown(tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, Trainer(), cells=(CLEAN,))

    assert [row["arm"] for row in run(path, None)] == ["clean"]


@pytest.mark.parametrize("table", CELLS)
def test_the_quick_cells_are_among_the_full_ones(table):
    assert set(CELLS[table](QUICK)) <= set(CELLS[table](FULL))
    assert len(list(CELLS[table](QUICK))) <= 24


def test_the_full_tables_hold_every_family_domain_rate_and_three_seeds():
    cells = list(CELLS["defence"](FULL))

    assert {cell.family for cell in cells} == {"gpt2", "opt", "bloom", "smollm2"}
    assert {cell.domain for cell in cells} == {"wikitext", "manual", "medical"}
    assert len({cell.seed for cell in cells}) == 3
    attacks = {(cell.direction, cell.rate) for cell in cells if cell.arm == "phalanx" and cell.regime == "plain"}
    assert attacks == {(direction, rate) for direction in ("forward", "backward") for rate in (0.3, 0.5, 0.7)}
    assert len(cells) == len(set(cells))


def test_the_summary_has_mean_and_spread_over_the_seeds():
    rows = [made_row(TableCell("gpt2", "manual", "plain", seed, "clean"), best=80.0 + seed) for seed in range(3)]

    (line,) = summarise_cells(rows)

    assert (line["perplexity_best"], line["perplexity_best_min"], line["perplexity_best_max"]) == (81.0, 80.0, 82.0)
    assert (line["seeds"], line["alarms"], line["same_bits_as_clean"]) == (3, None, 3)


def test_the_table_shows_the_spread_of_several_seeds():
    rows = [made_row(TableCell("gpt2", "manual", "plain", seed, "clean"), best=80.0 + seed) for seed in range(3)]

    assert as_tables(summarise_cells(rows)) == {
        "gpt2, manual, plain": [{"arm": "clean", "no attack": "81.0 / 82.0\n80.0-82.0 / 82.0-82.0"}]
    }


def test_the_summary_counts_seeds_that_end_with_the_bits_of_their_own_clean_run():
    guarded = [TableCell("gpt2", "manual", "plain", seed, "phalanx", "forward", 0.5) for seed in (0, 1)]
    rows = [
        made_row(CLEAN, digest="aa"),
        made_row(TableCell("gpt2", "manual", "plain", 1, "clean"), digest="bb"),
        made_row(guarded[0], digest="aa"),
        made_row(guarded[1], digest="aa"),
    ]

    assert summarise_cells(rows)[1]["same_bits_as_clean"] == 1


def test_a_training_that_broke_down_has_no_last_perplexity():
    rows = [made_row(CLEAN), made_row(ATTACKED, best=None, last=None, digest=None, status="diverged")]

    summary = summarise_cells(rows)

    assert summary[1]["diverged"] == 1
    assert summary[1]["same_bits_as_clean"] is None
    (lines,) = as_tables(summary).values()
    assert lines == [{"arm": "clean", "no attack": "80.0 / 82.0"}, {"arm": "attacked", "forward 0.5": "- / -"}]
    json.dumps(summary, allow_nan=False)


def test_a_table_of_which_nothing_is_trained_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))

    found = reproduce("vulnerability", size="quick", only_finished=True)

    assert (found["rows"], found["missing"]) == ([], len(list(CELLS["vulnerability"](QUICK))))


def test_a_row_of_another_text_is_trained_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, Trainer())
    again = Trainer()

    list(
        sweep_cells(
            [CLEAN, ATTACKED],
            open_table_rows(path, QUICK, lambda cell, row: cell != ATTACKED),
            again,
            lambda *told: None,
        )
    )

    assert again.trained == [ATTACKED]


def test_only_rows_of_one_text_are_compared():
    rows = [made_row(CLEAN, corpus_digest="new"), made_row(ATTACKED, corpus_digest="old")]
    other = made_row(TableCell("opt", "manual", "plain", 0, "attacked", "forward", 0.5), corpus_digest="old")

    assert rows_with_clean_text([*rows, other]) == [rows[0], other]


def test_the_packaged_models_sizes_decide_its_own_rows_alone(tmp_path):
    other = replace(LEARNED, packaged=replace(LEARNED.packaged, text_share=0.5))
    packaged = replace(CLEAN, family=PACKAGED)
    before, after = (open_table_rows(tmp_path / "rows.jsonl", size) for size in (LEARNED, other))

    assert before.cell_key(CLEAN) == after.cell_key(CLEAN)
    assert before.cell_key(packaged) != after.cell_key(packaged)
