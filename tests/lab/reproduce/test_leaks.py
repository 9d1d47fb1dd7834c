"""The leak table: measured cells, kept rows, one line for each cut."""

from dataclasses import replace

import pytest

from phalanx.errors import ConfigError, DataError
from phalanx.lab.bench.measure.row_file import sweep_cells
from phalanx.lab.reproduce.leaks import as_lines, measure_leaks, open_leak_rows, summarise_leaks
from phalanx.lab.reproduce.leaks.adapters import AdapterLab, adapter_cells
from phalanx.lab.reproduce.leaks.lab import ATTACKS, LeakCell, LeakLab
from phalanx.lab.reproduce.leaks.size import LeakSize
from phalanx.lab.reproduce.leaks.table import cells_of
from phalanx.lab.reproduce.leaks.texts import private_ids
from privacy_lab import at_most, text, tiny_model

TINY = LeakSize((0, 2), 128, 48, 8, steps=20, candidates=64, openings=256, batches=(4, 11))


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    source = tiny_model(tmp_path_factory.mktemp("leaks"))
    lab = LeakLab(TINY, source, lambda: (text(128, seed=1), text(48, seed=2)), lambda said: None)
    return [lab(cell) for cell in cells_of(TINY)]


def test_every_cut_is_measured_under_every_guard(rows):
    assert [(row["guard"], row["depth"]) for row in rows] == [
        ("plaintext", 0),
        ("plaintext", 2),
        ("sealed", 0),
        ("sealed", 2),
        ("masked", 0),
        ("masked", 2),
    ]
    assert all(0.0 <= row[name] <= 1.0 for row in rows for name in ATTACKS)


def test_plaintext_gives_the_text_away_and_guarded_cuts_give_chance(rows):
    lines = summarise_leaks(rows)

    assert [line["depth"] for line in lines] == [0, 2]
    for line in lines:
        assert line["plaintext"] >= 0.8
        for guard in ("sealed", "masked"):
            # the best of four attacks, one of them on few tokens
            assert line[guard] <= at_most(line["chance"], rows[0]["searched_tokens"])


def test_adapter_gradients_of_small_batches_are_read_in_plaintext_alone(tmp_path):
    source = tiny_model(tmp_path)
    lab = AdapterLab(source, lambda: (text(128, seed=1), text(48, seed=2)))

    rows = [lab(cell) for cell in adapter_cells(TINY)]

    assert [(row["guard"], row["tokens"]) for row in rows] == [
        (guard, tokens) for guard in ("plaintext", "sealed", "masked") for tokens in (4, 11)
    ]
    assert all(row["recall"] >= 0.8 for row in rows if row["guard"] == "plaintext")
    assert all(row["recall"] == 0.0 for row in rows if row["guard"] != "plaintext")


def test_what_was_not_measured_is_a_dash(rows):
    (line,) = as_lines(summarise_leaks([row for row in rows if row["guard"] == "plaintext" and row["depth"] == 2]))

    assert line["cut"] == "2"
    assert line["plaintext"].endswith(" %")
    assert line["sealed"] == line["masked"] == "-"


def test_rows_that_are_finished_are_not_measured_again(rows, tmp_path):
    path, cells = tmp_path / "leaks.jsonl", list(cells_of(TINY))
    told = []
    by_cell = dict(zip(cells, rows, strict=True))

    first = list(
        sweep_cells(cells, open_leak_rows(path, TINY), by_cell.get, lambda place, cell, row: told.append(cell))
    )
    again = list(sweep_cells(cells, open_leak_rows(path, TINY), None, lambda place, cell, row: told.append(cell)))

    assert told == cells
    assert again == first


def test_another_size_has_rows_of_its_own(rows, tmp_path):
    path, cell = tmp_path / "leaks.jsonl", LeakCell(0, "plaintext")
    open_leak_rows(path, TINY).append_row(cell, rows[0])

    assert open_leak_rows(path, TINY).find_row(cell) is not None
    assert open_leak_rows(path, replace(TINY, steps=21)).find_row(cell) is None


def test_a_size_that_leaks_has_not_is_refused():
    with pytest.raises(ConfigError, match="has no --small; choices: full, quick"):
        measure_leaks(size="small")


def test_the_lab_says_what_takes_long(tmp_path):
    told = []
    lab = LeakLab(TINY, tiny_model(tmp_path), lambda: (text(128, seed=1), text(48, seed=2)), told.append)

    lab(LeakCell(0, "plaintext"))

    assert told[:2] == ["preparing text", "building the front"]


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises((DataError, OSError), match=r"tokenizer\.json"):
        private_ids(tmp_path / "tokenizer.json", 1)
