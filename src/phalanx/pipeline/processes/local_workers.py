"""Local workers: one child process each, ended by id, never outliving the owner."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.config import dump_toml
from phalanx.pipeline.config import WorkerConfig
from phalanx.pipeline.processes.fork_server import can_fork
from phalanx.pipeline.processes.fork_server_client import ForkedWorker, ForkServer, start_fork_server

_SECONDS_TO_END = 5.0
WORKER_COMMAND = ("phalanx", "worker")
_WORTH_IMPORTING = (
    "phalanx.models.",
    "phalanx.objectives.",
    "phalanx.optimizers.",
    "phalanx.pipeline.",
    "phalanx.transport.",
    "transformers.models.",
)


_Process = subprocess.Popen[bytes] | ForkedWorker


class LocalWorkers:
    """Child processes by worker name; a context manager that ends them all."""

    def __init__(
        self,
        directory: Path,
        command: Sequence[str] = WORKER_COMMAND,
        others: Mapping[str, Sequence[str]] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            directory: Gets each worker's file and log.
            command: Module and arguments of a worker, without its file; another than the default is for drills only.
            others: The same for workers that have a command of their own, by name; for drills only.
            fork_server: Forks workers with `command`; `close` ends it.
        """
        self._directory = directory
        self._command = command
        self._others = others or {}
        self._processes: dict[str, _Process] = {}
        self._fork_server = fork_server

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Start one process per worker file; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, config in configs.items():
            path, log = self._directory / f"{name}.toml", self._directory / f"{name}.log"
            path.write_text(dump_toml(config), encoding="utf-8")
            command, server = self._others.get(name), self._fork_server
            if command is None and server is not None and server.is_open and server.threads == config.threads:
                self._processes[name] = server.start(name, path.resolve(), log.resolve())
            else:
                self._processes[name] = self._start_anew(command or self._command, path, log, config.threads)

    def _start_anew(self, command: Sequence[str], path: Path, log: Path, threads: int) -> _Process:
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
                [sys.executable, "-m", *command, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal is for the owner, which ends its workers in good order
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PHALANX_PARENT": str(os.getpid())},
            )

    def start_fork_server(self, threads: int) -> None:
        """Start a fork server, from which all later workers are forked, with all imports done once (Linux only).

        Args:
            threads: Threads of tensor kernels in those workers.
        """
        if self._fork_server is None and can_fork():
            modules = [name for name in sys.modules if name.startswith(_WORTH_IMPORTING)]
            self._directory.mkdir(parents=True, exist_ok=True)
            log = self._directory / "fork_server.log"
            self._fork_server = start_fork_server(self._command, log, threads, modules)

    def is_alive(self, name: str) -> bool:
        """Whether a local worker still runs; a worker that is not local counts as alive."""
        process = self._processes.get(name)
        return process is None or process.poll() is None

    def dismiss(self, name: str) -> None:
        """End one worker at once."""
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(_SECONDS_TO_END)

    def last_output(self, name: str) -> str:
        """The last line of a worker's log, for an error message; how the worker ended, where it has said nothing."""
        path = self._directory / f"{name}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else f"(no output, {self._end_of(name)})"

    def _end_of(self, name: str) -> str:
        code = self._processes[name].poll() if name in self._processes else None
        if code is None:
            return "it has not ended"
        return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"

    def close(self) -> None:
        """Give every worker a moment to end by itself, then end it."""
        for process in self._processes.values():
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_SECONDS_TO_END)
        self._close_fork_server()

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._processes:
            self.dismiss(name)
        self._close_fork_server()
