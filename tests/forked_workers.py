"""Local workers of runs inside the test process: real processes, forked from one server with all imports done."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.pipeline.processes import local_workers
from phalanx.pipeline.processes.fork_server import can_fork
from phalanx.pipeline.processes.fork_server_client import ForkServer
from phalanx.pipeline.processes.local_workers import LocalWorkers


@contextmanager
def forked_workers(directory: Path) -> Iterator[None]:
    """Let every run of this process fork its workers, as it does those that replace others (ADR 27).

    Workers with a command of their own, such as attackers, start from nothing as ever, and so do all workers of the
    runs in `tests/multiproc`.
    """
    names = itertools.count()
    servers: list[ForkServer] = []
    start_anew = LocalWorkers._start_anew

    def start(self: LocalWorkers, command: Sequence[str], path: Path, log: Path, threads: int) -> Any:
        if command != local_workers._COMMAND or threads != 1 or not can_fork():
            return start_anew(self, command, path, log, threads)
        if not servers:
            modules = [name for name in sys.modules if name.startswith(local_workers._WORTH_IMPORTING)]
            servers.append(ForkServer(command, directory / "fork_server.log", threads, modules))
        # two runs have workers of one name
        return servers[0].start(f"{path.stem}-{next(names)}", path.resolve(), log.resolve())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWorkers, "_start_anew", start)
        yield
    for server in servers:
        server.close()
