"""Progress on the terminal: a run's bar, or plain lines where there is no terminal, and a bar of rows that are done."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from phalanx.config import printable_text
from phalanx.telemetry.parties import PERIOD_S, PartyRow, parties_lines, parties_table, size_in_words

Kind = Literal["info", "alarm", "verdict", "eviction", "takeover", "note"]
_MAX_CHARACTERS = 2000
_WINDOW = 20
"""Steps over which the pace is taken."""
_DECISIONS = {
    "verdict": "verdicts",
    "takeover": "takeovers",
    "verdict_refused": "accusations dismissed",
    "alarm": "alarms",
}
_ENDINGS = ("evicted", "lost", "replaced", "revoked")
_MAX_GONE = 8
_STYLES: dict[Kind, str] = {
    "info": "",
    "note": "dim",
    "alarm": "yellow",
    "verdict": "bold magenta",
    "eviction": "bold red",
    "takeover": "bold cyan",
}


@dataclass(frozen=True)
class StepReading:
    """The figures of one finished step.

    Args:
        loss: Mean training loss of the step, in nats a token.
        audits: Number of audits so far; None where nobody audits.
        alarms: Number of alarms so far.
        accuracy: Latest accuracy of a classifier on held-out texts, shown in place of audits and alarms, which such
            runs do not have; None for other runs.
        update_norm: Norm of the update, shown in place of the loss where sites show noisy sums alone; None otherwise.
        epsilon: Epsilon that a private run has spent so far; None for other runs.
        data_share: Share of the step's time in which it waited for its batch; shown, with what follows, in place of
            audits and alarms where nobody audits.
        memory_bytes: Peak memory of this process, or of its GPU.
        mfu: Share of the devices' peak; None where it is not known.
    """

    loss: float
    tokens_per_s: float
    audits: int | None = 0
    alarms: int = 0
    accuracy: float | None = None
    update_norm: float | None = None
    epsilon: float | None = None
    data_share: float | None = None
    memory_bytes: float = 0.0
    mfu: float | None = None

    def __str__(self) -> str:
        first = f"loss {self.loss:.4f}" if self.update_norm is None else f"update norm {self.update_norm:.4f}"
        parts = [first, f"{self.tokens_per_s:,.0f} tokens/s"]
        if self.epsilon is not None:
            parts.append(f"epsilon {self.epsilon:.3f}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.3f}")
        elif self.data_share is None and self.audits is not None:
            parts += [f"audits {self.audits}", f"alarms {self.alarms}"]
        if self.data_share is not None:
            parts += [f"data {100 * self.data_share:.0f} %", size_in_words(int(self.memory_bytes))]
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.0f} %")
        return "  ".join(parts)


@dataclass(frozen=True)
class ShownProgress:
    """The words for the steps of a run.

    Attributes:
        has_guard: Whether there are audits and alarms to speak of.
    """

    unit: str = "step"
    has_guard: bool = True


class ShownParties(Protocol):
    """The parties of a run, as far as a terminal shows them."""

    def party_rows(self) -> Sequence[PartyRow]:
        """Every party as it is now; called from another thread, once a second."""

    def changed_rows(self) -> Sequence[PartyRow]:
        """The parties with another state, or other stages, than when this was last asked."""


class GuardStanding:
    """What the guard of a run has decided so far, in one line."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._gone: dict[str, str] = {}

    def count_decision(self, kind: str, party: object) -> None:
        """Take an event of the log; kinds that decide nothing are left out."""
        if kind in _DECISIONS:
            self._counts[kind] += 1
        if kind in _ENDINGS and isinstance(party, str):
            self._gone[party] = kind

    def __str__(self) -> str:
        parts = [f"{self._counts[kind]} {label}" for kind, label in _DECISIONS.items() if self._counts[kind]]
        gone = ", ".join(f"{printable_text(name, 40)} {kind}" for name, kind in list(self._gone.items())[-_MAX_GONE:])
        return "guard: " + "  ".join([*(parts or ["no verdict"]), *([f"out: {gone}"] if gone else [])])


class _Bar(RichProgress):
    """A progress bar below a table of the parties and the guard; figures without room beside it come below."""

    parties: ShownParties | None = None
    guard: GuardStanding | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.parties is not None:
            yield parties_table(self.parties.party_rows())
        if self.guard is not None:
            yield Text(str(self.guard), overflow="fold")
        yield _FittedTasks(self.make_tasks_table(self.tasks), self.tasks)


class _FittedTasks:
    """Bars with their figures in one line each, or in lines of their own where the terminal is too narrow."""

    def __init__(self, whole: Table, tasks: Sequence[Task]) -> None:
        self._whole, self._tasks = whole, tasks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widest = Measurement.get(console, options.update(width=_MAX_CHARACTERS), self._whole).maximum
        if widest <= options.max_width:
            yield self._whole
            return
        for task in self._tasks:
            yield Text(f"{int(task.completed)}/{int(task.total or 0)}  {task.fields['left']}")
            # no figure of it is cut: it goes on in the next line
            yield Text(task.fields["reading"], overflow="fold")


class ProgressDisplay:
    """The display of step, loss, tokens/s, audits, alarms and time left while a run goes on.

    Args:
        total_steps: Steps of the whole run.
        start_step: Steps that were done before, when a run is resumed.
        every: A plain line every so many steps where the console is no terminal.
        console: Console to draw on; None for standard output.
        clock: Returns the time in monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        every: int = 10,
        shown: ShownProgress | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shown = shown or ShownProgress()
        self._total = total_steps
        self._start = start_step
        self._every = max(1, every)
        self._console = console or Console()
        self._clock = clock
        # the first step of a session waits for processes and first kernels: the pace is taken from its end on
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self._parties: ShownParties | None = None
        self._guard = GuardStanding()
        self._task: TaskID | None = None
        self._bar: _Bar | None = None
        if self._console.is_terminal:
            self._bar = _Bar(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[reading]}", markup=False),
                TextColumn("[dim]{task.fields[left]}"),
                console=self._console,
                # a thread of its own draws it, beside the step
                refresh_per_second=1 / PERIOD_S,
            )

    def show_parties(self, parties: ShownParties) -> None:
        """Show parties from now on: above a terminal's bar, else in plain lines when they change."""
        self._parties = parties
        if self._bar is not None:
            self._bar.parties = parties
            self._bar.guard = self._guard if self._shown.has_guard else None

    def count_decision(self, kind: str, party: object) -> None:
        """Show a decision of the guard in its line above a terminal's bar; elsewhere the printed events tell it."""
        self._guard.count_decision(kind, party)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._task = self._bar.add_task("train", total=self._total, completed=self._start, reading="", left="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_step(self, step: int, reading: StepReading) -> None:
        """Show that `step` steps are done."""
        reading = reading if self._shown.has_guard else replace(reading, audits=None)
        remaining = self._time_left(step)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, reading=str(reading), left=remaining)
        elif step % self._every == 0 or step in (self._start + 1, self._total):
            self._console.print(
                Text(f"{self._shown.unit} {step}/{self._total}  {reading}  {remaining}"), soft_wrap=True
            )
            for news in parties_lines(self._parties.changed_rows()) if self._parties is not None else ():
                self._console.print(Text(f"  {printable_text(news)}"), soft_wrap=True)

    def print_message(self, text: str, kind: Kind = "info") -> None:
        """Print one message above the bar, in the colour of its kind.

        The text may hold names that a peer chose: markup in it is not interpreted and control
        characters, which could move the cursor or rename the window, are shown as a question mark.
        """
        self._console.print(Text(printable_text(text, _MAX_CHARACTERS), style=_STYLES[kind]), soft_wrap=True)

    def _time_left(self, step: int) -> str:
        """The time left by the mean pace of the last steps; nothing while only the session's first step is done."""
        if self._marks and step <= self._marks[-1][0]:
            # the run went back: what was timed between is done again
            self._marks.clear()
        self._marks.append((step, self._clock()))
        (first, began), (last, now) = self._marks[0], self._marks[-1]
        if last == first or step >= self._total:
            return ""
        seconds = round((now - began) / (last - first) * (self._total - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


RowsTold = Callable[[int, int], None]
"""Told how many rows are done, of how many."""


@contextmanager
def row_bar(what: str, console: Console | None = None) -> Iterator[RowsTold]:
    """Show a bar from the first row that is told of.

    Args:
        what: The rows' name on the screen.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, of: bar.update(task, completed=done, total=of, visible=True)
