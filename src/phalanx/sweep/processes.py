"""Trials that are trained side by side, each in a process of its own; they are measured here, one at a time."""

import math
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console

from phalanx.child import AskedProcess, answer_orders, die_with_parent
from phalanx.config import dump_toml
from phalanx.errors import DiskError, PeerLostError, PhalanxError, TrainingError, is_disk_fault
from phalanx.sweep.config import TrialRun
from phalanx.sweep.trial import MIB, RunTrials
from phalanx.train import holds_run, load_run, train
from phalanx.train.batches.scores import ValidationResult
from phalanx.train.sessions.hooks import OnValidation
from phalanx.train.setup.planned_memory import planned_bytes

_MODULE = "phalanx.sweep.processes"


class ProcessTrials(RunTrials):
    """Trials in processes of their own.

    Args:
        max_memory_mib: All trials that are under way need no more together, by the planner's estimate; None takes the
            memory of this machine. A trial waits until there is room.

    Guarantees:
        A loss is measured as `RunTrials` does, by this process. A trial's process ends with this one, however that
        happens, and what it leaves is gone on with.
    """

    def __init__(
        self, open_log: Callable[[Path], AbstractContextManager[Console]], max_memory_mib: int | None = None
    ) -> None:
        super().__init__(open_log)
        self._limit = psutil.virtual_memory().total if max_memory_mib is None else max_memory_mib * MIB
        self._room, self._used = threading.Condition(), 0
        self._measuring, self._children = threading.Lock(), set[AskedProcess]()
        self._is_over = threading.Event()

    def find_excess(self, run: TrialRun, max_memory_mib: int | None) -> str | None:
        with self._measuring:
            return super().find_excess(run, max_memory_mib)

    def train_trial(self, run: TrialRun, directory: Path, on_validation: OnValidation) -> str:
        """Train a trial, or go on with it, once there is room for it.

        Raises:
            PeerLostError: Its process was killed, which is no verdict on the trial.
            KeyboardInterrupt: All trials were ended meanwhile.
        """
        needed = planned_bytes(run)
        with self._room:
            self._room.wait_for(lambda: not self._used or self._used + needed <= self._limit)
            self._used += needed
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            child = AskedProcess([_MODULE], log=directory.with_suffix(".log"))
            self._children.add(child)
            with closing(child):
                if self._is_over.is_set():
                    raise KeyboardInterrupt
                return _follow_trial(child, run, directory, on_validation)
        finally:
            with self._room:
                self._used -= needed
                self._room.notify_all()

    def measure_loss(self, run: TrialRun, directory: Path, on: str) -> float:
        with self._measuring:
            return super().measure_loss(run, directory, on)

    def end_trials(self) -> None:
        """End all processes at once; a resumed search goes on with their trials."""
        self._is_over.set()
        for child in tuple(self._children):
            child.close()


def _follow_trial(child: AskedProcess, run: TrialRun, directory: Path, on_validation: OnValidation) -> str:
    """Tell a trial's process what to train, and after each validation whether it goes on."""
    try:
        answer, _ = child.ask({"directory": str(directory), "name": run.name}, dump_toml(run).encode())
        while "steps" in answer:
            is_cut = False
            try:
                on_validation(answer["steps"], _read_result(answer))
            except KeyboardInterrupt:
                is_cut = True
            answer, _ = child.ask({"cut": is_cut})
    except EOFError as exc:
        raise PeerLostError(f"the process of {directory.name} ended: {exc}; continue with --resume") from exc
    if "error" in answer:
        raise (DiskError if answer["is_disk_fault"] else TrainingError)(answer["error"])
    return str(answer["status"])


def _read_result(answer: dict[str, Any]) -> ValidationResult:
    held_out, named = answer["own"], answer["named"]
    return ValidationResult(_from_json(held_out), {name: _from_json(value) for name, value in named.items()})


def _from_json(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _to_json(value: object) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None


def train_one() -> None:
    """Train the trial that the starter sends, and wait for its word after each validation."""
    die_with_parent()
    orders, answers = queue.SimpleQueue[tuple[dict[str, Any], bytes]](), queue.SimpleQueue[dict[str, Any]]()

    def hand_over(order: dict[str, Any], content: bytes) -> list[tuple[dict[str, Any], bytes]]:
        orders.put((order, content))
        return [(answers.get(), b"")]

    # signals are for the thread that trains
    speaker = threading.Thread(target=answer_orders, args=(hand_over,), daemon=True)
    speaker.start()
    order, content = orders.get()

    def ask_starter(num_steps: int, result: ValidationResult) -> None:
        named = {name: _to_json(value) for name, value in result.named.items()}
        answers.put({"steps": num_steps, "own": _to_json(result.own), "named": named})
        if orders.get()[0]["cut"]:
            raise KeyboardInterrupt

    answers.put(_train_order(order, content, ask_starter))
    speaker.join()


def _train_order(order: dict[str, Any], content: bytes, on_validation: OnValidation) -> dict[str, Any]:
    directory, console = Path(order["directory"]), Console(file=sys.stderr, width=160)
    try:
        with TemporaryDirectory(prefix="phalanx-trial-") as spare:
            file = Path(spare) / "run.toml"
            file.write_bytes(content)
            run = load_run(file).placed_at(order["name"], directory.parent)
        summary = train(run, directory, resume=holds_run(directory), console=console, on_validation=on_validation)
    except PhalanxError as exc:
        cause = exc.__cause__
        is_full = isinstance(exc, DiskError) or (isinstance(cause, OSError) and is_disk_fault(cause))
        return {"error": str(exc), "is_disk_fault": is_full}
    return {"status": str(summary["status"])}


if __name__ == "__main__":
    train_one()
