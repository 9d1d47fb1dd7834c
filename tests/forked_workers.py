"""Local workers of runs inside the test process: real processes, forked from one server with all imports done."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.pipeline.processes import local_workers
from phalanx.pipeline.processes.fork_server import can_fork
from phalanx.pipeline.processes.fork_server_client import ForkedWorker, ForkServer, start_fork_server
from phalanx.pipeline.processes.local_workers import LocalWorkers


class _SharedServer(ForkServer):
    """A fork server that many runs use, each of which believes that it has its own."""

    def __init__(self, real: ForkServer) -> None:
        self.threads = real.threads
        self._real = real
        self._numbers = itertools.count()

    @property
    def is_open(self) -> bool:
        return self._real.is_open

    def start(self, name: str, file: Path, log: Path) -> ForkedWorker:
        # two runs have workers of one name
        return self._real.start(f"{name}-{next(self._numbers)}", file, log)

    def close(self) -> None:
        pass


@contextmanager
def forked_workers(directory: Path) -> Iterator[None]:
    """Let all runs of this process fork their workers from one server, instead of each from a server of its own.

    Workers with a command of their own, such as attackers, start from nothing as ever.
    """
    servers: list[ForkServer] = []
    start_own = LocalWorkers.start_fork_server

    def share(self: LocalWorkers, threads: int) -> None:
        if self._command != local_workers.WORKER_COMMAND or threads != 1 or not can_fork():
            start_own(self, threads)
            return
        if not servers:
            modules = [name for name in sys.modules if name.startswith(local_workers._WORTH_IMPORTING)]
            servers.append(start_fork_server(self._command, directory / "fork_server.log", threads, modules))
        self._fork_server = _SharedServer(servers[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWorkers, "start_fork_server", share)
        yield
    for server in servers:
        server.close()
