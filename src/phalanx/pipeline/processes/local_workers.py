"""Local workers: one child process each, ended by id, never outliving the owner."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.child import ChildProcess, PythonProcess, last_lines, request_stacks
from phalanx.config import dump_toml
from phalanx.pipeline.config import WorkerConfig
from phalanx.pipeline.processes.fork_server import can_fork
from phalanx.pipeline.processes.fork_server_client import ForkServer, start_fork_server

WORKER_COMMAND = ("phalanx", "worker")
_WORTH_IMPORTING = (
    "phalanx.models.",
    "phalanx.objectives.",
    "phalanx.optimizers.",
    "phalanx.pipeline.",
    "phalanx.transport.",
    "transformers.models.",
)


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
        self._processes: dict[str, ChildProcess] = {}
        self._fork_server = fork_server

    def start_workers(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Start one process per worker file; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, config in configs.items():
            path, log = self._directory / f"{name}.toml", self._directory / f"{name}.log"
            path.write_text(dump_toml(config), encoding="utf-8")
            command, server = self._others.get(name), self._fork_server
            if command is None and server is not None and server.is_open and server.threads == config.threads:
                self._processes[name] = server.start_worker(name, path.resolve(), log.resolve())
            else:
                threads = {"OMP_NUM_THREADS": str(config.threads)}
                self._processes[name] = PythonProcess((*(command or self._command), str(path)), threads, log)

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

    def is_worker_alive(self, name: str) -> bool:
        """Whether a local worker still runs; a worker that is not local counts as alive."""
        process = self._processes.get(name)
        return process is None or process.poll() is None

    def dismiss_worker(self, name: str) -> None:
        """End one worker at once; one that still runs leaves the stacks of its threads in its log."""
        if name in self._processes:
            process = self._processes[name]
            if process.poll() is None and process.pid is not None:
                request_stacks(process.pid, self._directory / f"{name}.log")
            process.kill()

    def worker_output(self, name: str) -> str:
        """The last line of a worker's log, for an error message; how the worker ended, where it has said nothing."""
        how = self._processes[name].how_it_ended() if name in self._processes else "not started here"
        return last_lines(self._directory / f"{name}.log", otherwise=f"(no output, {how})")

    def close(self) -> None:
        """Give every worker a moment to end by itself, then end it."""
        for process in self._processes.values():
            process.end_or_kill()
        self._close_fork_server()

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._processes:
            self.dismiss_worker(name)
        self._close_fork_server()
