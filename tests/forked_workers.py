"""Local workers of runs inside the test process: real processes, forked from one server with all imports done."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from forked_commands import ForkedCommands
from phalanx.child import ChildProcess, PythonProcess
from phalanx.pipeline.processes import local_workers
from phalanx.pipeline.processes.fork_server import can_fork
from phalanx.pipeline.processes.local_workers import LocalWorkers

_FORKED = ("phalanx", "phalanx.lab.attacks.worker")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@contextmanager
def forked_workers(commands: ForkedCommands) -> Iterator[None]:
    """Let the runs of a test fork their workers from one server, instead of each from a server of its own.

    Attackers are forked as well, into their own program; workers with another command start from nothing.
    """
    start_own = LocalWorkers.start_fork_server

    def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> ChildProcess:
        module, *arguments = command
        if module not in _FORKED or environment != _ONE_THREAD or not can_fork():
            return PythonProcess(command, environment, log)
        return commands.start_worker(module, arguments, log.resolve())

    def start_server(self: LocalWorkers, threads: int) -> None:
        if threads != 1 or not can_fork():
            start_own(self, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_workers, "PythonProcess", start)
        patch.setattr(LocalWorkers, "start_fork_server", start_server)
        yield
