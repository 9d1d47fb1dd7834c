"""A bar on a terminal, of rows that are done; nothing is shown where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

RowsTold = Callable[[int, int], None]
"""Told how many rows are done, of how many."""


@contextmanager
def row_bar(what: str, console: Console | None = None) -> Iterator[RowsTold]:
    """Show a bar from the first row that is told of.

    Args:
        what: The rows' name on the screen.
        console: Standard error when left out.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, of: bar.update(task, completed=done, total=of, visible=True)
