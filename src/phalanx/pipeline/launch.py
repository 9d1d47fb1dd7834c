"""Local workers: one child process each, ended by id, never outliving the owner."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from phalanx.config import dump_toml
from phalanx.pipeline.config import WorkerConfig

_SECONDS_TO_END = 5.0


class LocalWorkers:
    """Child processes by worker name; a context manager that ends them all."""

    def __init__(self, directory: Path) -> None:
        """`directory` gets each worker's file and log."""
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Start one process per worker file; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, config in configs.items():
            path = self._directory / f"{name}.toml"
            path.write_text(dump_toml(config), encoding="utf-8")
            with (self._directory / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
                    [sys.executable, "-m", "phalanx", "worker", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C in a terminal is for the owner, who ends its workers in good order
                    process_group=0,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": str(config.threads),
                        "PHALANX_PARENT": str(os.getpid()),
                    },
                )

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

    def pids(self) -> dict[str, int]:
        """Process ids by worker name."""
        return {name: process.pid for name, process in self._processes.items()}

    def last_words(self, name: str) -> str:
        """The last line of a worker's log, for an error message."""
        path = self._directory / f"{name}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else "(no output)"

    def close(self) -> None:
        """Give every worker a moment to end by itself, then end it."""
        for process in self._processes.values():
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_SECONDS_TO_END)

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._processes:
            self.dismiss(name)
