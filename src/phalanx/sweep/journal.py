"""The journal of a search: a line for each decision, on the disk before the next one; nothing else is remembered."""

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import ConfigError, InputError
from phalanx.sweep.config import SweepConfig, Value

JOURNAL = "sweep.jsonl"
State = Literal["running", "completed", "pruned", "refused", "failed"]


@dataclass
class Trial:
    """What is known of one trial.

    Attributes:
        reports: Validation loss by finished steps, as the trial's own run told it; cuts it short, and never decides.
        loss: Loss of its verified checkpoint, measured by the owner alone; None where there is none.
        steps: Optimizer steps that it took.
        again: Loss of the runs that trained it again, by seed; infinity of one that failed.
    """

    number: int
    values: dict[str, Value]
    state: State = "running"
    loss: float | None = None
    reason: str = ""
    steps: int = 0
    reports: dict[int, float] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)
    again_steps: int = 0


class SweepJournal:
    """The journal of one directory.

    Attributes:
        lock: Held while a line is written; hold it to read trials that other threads are training.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.lock = threading.RLock()
        self.trials: list[Trial] = []

    def append_line(self, kind: str, **facts: Any) -> None:
        """Write a line, and wait until the disk has it."""
        row = {"kind": kind, **facts}
        with self.lock:
            self._file.write((json.dumps(row) + "\n").encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self.follow_line(row)

    def follow_line(self, row: Mapping[str, Any]) -> None:
        """Take one line; a loss that is no number stands as null."""
        kind = row["kind"]
        if kind == "begun":
            self.trials.append(Trial(int(row["number"]), dict(row["values"])))
        elif kind != "sweep":
            trial = self.trials[row["number"]]
            if kind == "report":
                trial.reports[int(row["step"])] = _read_loss(row["loss"])
            elif kind == "again":
                trial.again[int(row["seed"])] = _read_loss(row["loss"])
                trial.again_steps += int(row["steps"])
            else:
                trial.state, trial.reason, trial.steps = row["state"], row["reason"], int(row["steps"])
                trial.loss = row["loss"]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all trials so far."""
        return sum(trial.steps + trial.again_steps for trial in self.trials)


def _read_loss(loss: float | None) -> float:
    return float("inf") if loss is None else float(loss)


@contextlib.contextmanager
def open_journal(directory: Path, sweep: SweepConfig, *, resume: bool) -> Iterator[SweepJournal]:
    """Open the journal of a search; half a line at its end (a crash while writing) is removed.

    Raises:
        ConfigError: Another process searches there, there is a search and it is not resumed, or it is another one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / JOURNAL
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(f"{directory}: another process searches there; wait for its end") from exc
        file.seek(0)
        content = file.read()
        lines = content[: content.rfind(b"\n") + 1]
        file.truncate(len(lines))
        journal, digest = SweepJournal(file), sweep.search_digest()
        if not lines:
            journal.append_line("sweep", digest=digest)
        else:
            if not resume:
                raise ConfigError(
                    f"{directory}: already has a search; add --resume to continue it, or choose another --dir"
                )
            try:
                rows = [json.loads(row) for row in lines.splitlines()]
                known_digest = rows[0]["digest"]
                for row in rows[1:]:
                    journal.follow_line(row)
            except (ValueError, KeyError, TypeError, IndexError) as exc:
                raise InputError(f"{path}: is no journal of a search ({exc}); choose another --dir") from exc
            if known_digest != digest:
                raise ConfigError(
                    f"{directory}: belongs to a search with other values or another run file; only trials, jobs, "
                    "max_steps, again.best and again.seeds may change; choose another --dir"
                )
        yield journal
