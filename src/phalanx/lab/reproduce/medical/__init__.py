"""Medical texts, classified by clients that may not show them: a comparison of ways to train together."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.data.tasks import TASKS, LabelledExamples
from phalanx.lab.bench.measure.harness import cache_directory
from phalanx.lab.bench.measure.machine import load_average, reproduce_head
from phalanx.lab.bench.measure.row_file import RowFile, sweep_cells
from phalanx.lab.reproduce.medical.cell import MedicalCell, cells_of, missing_part, not_measured, runnable_cells
from phalanx.lab.reproduce.medical.front import epsilon_of
from phalanx.lab.reproduce.medical.size import DOMAIN_SIZES, DOMAINS, NOISE, SIZES, MedicalSize, describe_medical_size
from phalanx.lab.reproduce.medical.summary import as_tables, compare_arms, summarise_medical
from phalanx.lab.reproduce.medical.workshop import MedicalLab, load_tasks
from phalanx.pipeline import keep_freed_memory
from phalanx.train.setup.process import deterministic_kernels
from typing import Self
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text
from phalanx.lab.reproduce.medical.cell import Row


class CellBar:
    """A context manager.

    Args:
        console: Console for progress; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self._console.is_terminal:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[last]}", markup=False), console=self._console)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def set_totals(self, total: int, finished: int) -> None:
        """Say how many cells there are, and how many were finished before."""
        if self._bar is not None:
            self._task = self._bar.add_task("cells", total=total, completed=finished, last="")

    def print_text(self, text: str) -> None:
        """Print one line."""
        self._console.print(Text(f"reproduce: {text}"), soft_wrap=True)

    def show_finished(self, place: str, cell: MedicalCell, row: Row) -> None:
        """A cell is finished."""
        self.print_text(f"{place}: {cell.medical_label}: accuracy {row['accuracy']:.3f}, {row['wall_s']:.0f} s")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, last=cell.medical_label)


__all__ = ["DOMAIN_SIZES", "SIZES", "as_tables", "reproduce_medical"]

PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""


def reproduce_medical(
    *, size: str = "full", only_finished: bool = False, home: Path | None = None, table: str = "medical"
) -> dict[str, Any]:
    """Train the missing cells of the comparison; progress goes to standard error.

    Args:
        size: A name in `SIZES`: "full", or "quick" with one seed and three tasks; of the other table "full".
        table: "medical", or "domains" for texts of other domains.
        only_finished: Train nothing; show what earlier calls have finished.
        home: Folder of data files; None means the usual places.

    Returns:
        Raw rows, their summary over the seeds, paired comparisons, and everything that decided them. A task without
        its data is named in `absent`; an arm that cannot be run here has rows without figures.
    """
    chosen = DOMAIN_SIZES[size] if table == DOMAINS else SIZES[size]
    cache = cache_directory()
    load = load_average()
    with CellBar() as bar:
        tasks, absent = load_tasks(chosen, home)
        cells = cells_of(chosen, tasks)
        todo = list(runnable_cells(cells))
        rows_there = _rows_in(cache / "reproduce" / "medical.jsonl", chosen, tasks)
        bar.set_totals(len(todo), sum(rows_there.find_row(cell) is not None for cell in todo))
        workshop = None if only_finished else MedicalLab(chosen, tasks, cache, bar.print_text)
        with deterministic_kernels(threads=1):
            keep_freed_memory()
            rows = list(sweep_cells(todo, rows_there, workshop, bar.show_finished))
    finished = len(rows)
    rows += [not_measured(cell, why) for cell in cells if (why := missing_part(cell.arm)) is not None]
    return {
        **reproduce_head(table, size, load),
        "protocol": {"number": PROTOCOL, **describe_medical_size(chosen), "noise_epsilon_per_token": epsilon_of(NOISE)},
        "tasks": {name: _describe_task(name, task) for name, task in tasks.items()},
        "absent": absent,
        "missing": len(todo) - finished,
        "summary": summarise_medical(rows),
        "comparisons": compare_arms(rows),
        "rows": rows,
    }


def _rows_in(path: Path, size: MedicalSize, tasks: dict[str, LabelledExamples]) -> RowFile[MedicalCell]:
    digests = {name: task.examples_digest for name, task in tasks.items()}
    return RowFile(path, lambda cell: [PROTOCOL, describe_medical_size(size), digests[cell.task], asdict(cell)])


def _describe_task(name: str, task: LabelledExamples) -> dict[str, Any]:
    card = TASKS[name]
    return {
        "question": card.question,
        "source": card.source,
        "licence": card.licence,
        "classes": list(task.classes),
        "texts": len(task.examples),
        "contradictory": task.contradictory,
        "clients_by": "silo" if task.has_silos else "class",
        "digest": task.examples_digest,
    }
