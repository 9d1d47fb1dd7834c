"""A bench of detection that was killed goes on, with rows of this very code and of no other."""

from pathlib import Path

import pytest

from phalanx.cli import run_command as command_line
from phalanx.lab.bench.detection import detection
from phalanx.lab.bench.detection.cell import DetectionCell, small_run
from phalanx.lab.bench.detection.detection import measure_detection, open_detection_rows
from phalanx.lab.bench.detection.simulated_run import play_company
from phalanx.lab.bench.measure.machine import code_version
from phalanx.lab.bench.measure.row_file import Row

CELLS = [DetectionCell(small_run(3, guard), guard, 1) for guard in ("off", "light")]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the guards of the companies that were really simulated."""
    names: list[str] = []

    def watched(cell: DetectionCell, directory: Path, cache: Path) -> object:
        names.append(cell.guard)
        return play_company(cell, directory, cache)

    monkeypatch.setattr(detection, "play_company", watched)
    return names


def bench(path: Path, code: str = "this", only_finished: bool = False) -> dict[str, object]:
    return measure_detection(CELLS, open_detection_rows(path, code), quick=True, only_finished=only_finished)


def test_a_killed_bench_plays_only_what_is_missing(
    tmp_path: Path, played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patch:

        def killed(cell: DetectionCell, directory: Path, cache: Path) -> object:
            if cell.guard == "light":
                raise KeyboardInterrupt
            return play_company(cell, directory, cache)

        patch.setattr(detection, "play_company", killed)
        with pytest.raises(KeyboardInterrupt):
            bench(path)

    shown = bench(path, only_finished=True)
    assert (shown["missing"], played) == (1, [])
    rows = bench(path)["rows"]
    assert played == ["light"]
    assert isinstance(rows, list)
    assert [row["guard"] for row in rows] == ["off", "light"]
    assert bench(path, only_finished=True)["missing"] == 0


@pytest.mark.slow
def test_rows_of_another_commit_are_not_used(tmp_path: Path, played: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    bench(path, "one commit")

    assert bench(path, "another commit", only_finished=True)["missing"] == 2
    bench(path, "another commit")

    assert played == ["off", "light", "off", "light"]


@pytest.mark.parametrize("change", [{"steps": 2}, {"guard": "another name"}])
def test_a_row_is_of_one_cell(tmp_path: Path, change: Row) -> None:
    rows = open_detection_rows(tmp_path / "rows.jsonl", "this")

    assert rows.cell_key(DetectionCell(**{**vars(CELLS[0]), **change})) != rows.cell_key(CELLS[0])


def test_files_that_differ_from_the_commit_are_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.lab.bench.measure.machine.current_commit", lambda: "abc")
    assert code_version() == "abc"
    monkeypatch.setattr("phalanx.lab.bench.measure.machine.current_commit", lambda: "abc-dirty")
    first = code_version()

    assert first.startswith("abc-dirty+")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: b"other sources")
        assert code_version() != first


def test_a_bench_that_keeps_no_rows_has_none_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "overhead", "--finished"]) == 2

    assert "overhead saves no rows" in capsys.readouterr().err
