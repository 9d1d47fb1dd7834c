"""The bench's side of its arms: start their processes, let them step in turn, measure each from outside."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.closing import Closeable
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.process_clock import cpu_seconds, process_tree, wait_until_quiet
from phalanx.lab.bench.overhead.arm import ArmSpec, Report, StepsRequest

_QUIET_TIMEOUT_S = 120.0
_SECONDS_TO_END = 15.0


@dataclass(frozen=True)
class Block:
    """A few steps of one arm, measured from their start until all its processes are idle again.

    Attributes:
        steps: How many.
        wall_s: Of the block.
        cpu_s: Of all processes of the arm together.
        report: What the arm itself says.
    """

    steps: int
    wall_s: float
    cpu_s: float
    report: Report


class ArmProcess(Closeable):
    """One arm's process with its workers; idle between blocks."""

    def __init__(self, spec: ArmSpec, environment: Mapping[str, str]) -> None:
        directory = Path(spec.directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        path = directory.parent / f"{spec.arm}.json"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        self.arm = spec.arm
        self._log = directory.parent / f"{spec.arm}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
                [sys.executable, "-m", "phalanx.lab.bench.overhead.arm", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PHALANX_PARENT": str(os.getpid()), **environment},
            )
        try:
            self._answer()
        except TrainingError:
            self.close()
            raise
        self.pids = process_tree(self._process.pid)

    def run(self, steps: int, threads: int = 1) -> Block:
        """Run some steps and wait until everything that they started has ended.

        Raises:
            TrainingError: The arm failed; the message holds the last line of its log.
        """
        cpu, started = cpu_seconds(self.pids), time.perf_counter()
        self._order(StepsRequest(steps=steps, threads=threads))
        report = self._answer()
        ended = wait_until_quiet(self.pids, _QUIET_TIMEOUT_S)
        return Block(steps, ended - started, cpu_seconds(self.pids) - cpu, report)

    def lose(self, worker: str) -> Report:
        """Kill one of the arm's workers, and run a step without it.

        Returns:
            What happened, with the seconds from the loss to the end of the step. Nothing can be measured from outside
            afterwards.

        Raises:
            TrainingError: The arm failed.
        """
        self._order(StepsRequest(steps=1, threads=1, lose=worker))
        return self._answer()

    def close(self) -> None:
        """Let the arm end by itself, or end it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        try:
            # a dead arm's pipe is broken
            with contextlib.suppress(BrokenPipeError):
                if stdin is not None:
                    stdin.close()
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_SECONDS_TO_END)
        finally:
            if stdout is not None:
                stdout.close()

    def _order(self, order: StepsRequest) -> None:
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(order.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._failure() from exc

    def _answer(self) -> Report:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise self._failure()
        return Report.model_validate_json(line)

    def _failure(self) -> TrainingError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return TrainingError(f"bench: arm {self.arm!r} ended: {lines[-1] if lines else '(no output)'}")
