"""The progress of a sweep, on standard error: a bar on a terminal, a line for each finished cell anywhere."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from phalanx.lab.reproduce.medical.cell import MedicalCell, Row


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
