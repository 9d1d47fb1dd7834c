"""A handle on an owner's process under test: start it, find its workers, read how far it is, end it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.child import PARENT
from phalanx.closing import Closeable
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.process_clock import process_tree, worker_name
from phalanx.telemetry import read_metrics
from phalanx.train import PipelineRun
from phalanx.train.records.run_directory import RunDirectory

_SECONDS_TO_END = 30.0
_LEASH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
"""
"""Becomes a module that is told to end when the process that wanted it has ended (PR_SET_PDEATHSIG outlives exec):
torchrun would go on for ever."""


def train_command(run: PipelineRun, run_dir: Path) -> list[str]:
    """Make a run's directory and say what trains it: begins it, and begun again goes on with it."""
    RunDirectory(run_dir, run, resume=False)
    return ["phalanx", "train", str(run_dir / "config.toml"), "--run-dir", str(run_dir), "--resume"]


def under_torchrun(command: Sequence[str], restarts: int) -> list[str]:
    """The same command, started again by torchrun after each failure, at most so often."""
    return [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        f"--max-restarts={restarts}",
        "-m",
        *command,
    ]


class RunProcess(Closeable):
    """A run in processes of its own; a context manager that leaves none of them behind."""

    def __init__(self, command: Sequence[str], run_dir: Path, cache: Path) -> None:
        """Start it."""
        self.run_dir = run_dir
        self._log = run_dir.with_name(f"{run_dir.name}.log")
        inherited = {name: value for name, value in os.environ.items() if name != PARENT}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own files
                [sys.executable, "-c", _LEASH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**inherited, "PHALANX_CACHE": str(cache.resolve()), "OMP_NUM_THREADS": "1"},
            )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def await_success(self, timeout_s: float) -> None:
        """Wait for a good end."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise self.make_failure(f"did not end within {timeout_s:.0f} s") from exc
        if code != 0:
            raise self.make_failure(f"ended with {code}")

    def make_failure(self, what: str) -> TrainingError:
        """An error that shows the end of the owner's log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return TrainingError(f"bench: the run in {self.run_dir} {what}: {' / '.join(lines[-3:]) or '(no output)'}")

    def read_steps(self) -> list[dict[str, Any]]:
        """Its steps so far, one line each."""
        path = self.run_dir / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def worker_pids(self) -> list[int]:
        """Return process ids of all its workers, also of starting workers."""
        return sorted(pid for pid in descendant_pids(self._process.pid) if worker_name(pid) is not None)

    def close(self) -> None:
        """End it and all that belongs to it: the first process first, so that it starts nothing anew."""
        below = descendant_pids(self._process.pid)
        if self.is_running:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(_SECONDS_TO_END)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendant_pids(root: int) -> list[int]:
    """Process ids of children, their children and so on (Linux)."""
    return process_tree(root)[1:]
