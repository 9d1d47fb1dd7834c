"""The progress of a build on a terminal: pieces, MB/s and drops by step; no output without a terminal."""

import time
from collections import Counter
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_STEPS = 4


class BuildBar:
    """A bar for each phase of a build."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[drops]}", markup=False, style="yellow"),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._begun = 0.0
        self._bytes = 0
        self._left_out: Counter[str] = Counter()

    def begin_phase(self, phase: str, pieces: int, size_bytes: int) -> None:
        """Show a bar for another phase."""
        if not self._console.is_terminal:
            return
        if self._task is not None:
            self._bar.stop_task(self._task)
        self._begun, self._bytes = time.monotonic(), 0
        size = f"{phase}, {size_bytes / 1e6:.1f} MB" if size_bytes else phase
        self._task = self._bar.add_task(size, total=pieces, speed="", drops=self._describe_drops())

    def finish_piece(self, size_bytes: int, left_out: dict[str, int]) -> None:
        """Show that a piece is done."""
        self._bytes += size_bytes
        self._left_out.update(left_out)
        if self._task is None:
            return
        seconds = time.monotonic() - self._begun
        speed = f"{self._bytes / 1e6 / seconds:.2f} MB/s" if self._bytes and seconds else ""
        self._bar.update(self._task, advance=1, speed=speed, drops=self._describe_drops())

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def _describe_drops(self) -> str:
        top_steps = self._left_out.most_common(_STEPS)
        return "left out: " + ", ".join(f"{step} {count}" for step, count in top_steps) if top_steps else ""
