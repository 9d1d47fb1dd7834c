"""Local workers and ranks of runs inside the test process: real processes, forked from one server."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from forked_commands import ForkedCommand, ForkedCommands
from phalanx.child import ChildProcess, PythonProcess, last_lines
from phalanx.parallel.control import local_ranks
from phalanx.pipeline.processes import local_workers
from phalanx.pipeline.processes.fork_server import can_fork
from phalanx.pipeline.processes.local_workers import LocalWorkers

_FORKED = ("phalanx", "phalanx.lab.attacks.worker")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ForkedRank(ChildProcess):
    """A rank, with what `LocalRanks` asks of its processes."""

    def __init__(self, command: ForkedCommand, log: Path) -> None:
        self._command, self._log = command, log

    @property
    def pid(self) -> int:
        return self._command.pid

    def poll(self) -> int | None:
        return self._command.poll()

    def wait(self, timeout_s: float) -> int | None:
        return self._command.wait(timeout_s)

    def last_output(self, num_lines: int = 1) -> str:
        return last_lines(self._log, num_lines)

    def _send_kill(self) -> None:
        self._command.kill()


@contextmanager
def forked_workers(commands: ForkedCommands) -> Iterator[None]:
    """Let the runs of a test fork their workers and ranks from one server, which has all imports done.

    Attackers are forked as well, into their own program; workers with another command start from nothing.
    """
    start_own = LocalWorkers.start_fork_server

    def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> ChildProcess:
        module, *arguments = command
        if module not in _FORKED or environment != _ONE_THREAD or not can_fork():
            return PythonProcess(command, environment, log)
        return commands.start_worker(module, arguments, log.resolve())

    def start_rank(command: Sequence[str], environment: Mapping[str, str], log: Path, *, renew: bool) -> ChildProcess:
        module, *arguments = command
        if module not in _FORKED or not environment.items() >= _ONE_THREAD.items() or not can_fork():
            return PythonProcess(command, environment, log, renew=renew)
        log.unlink(missing_ok=True)
        return ForkedRank(commands.start(module, arguments, log.resolve(), environment), log)

    def start_server(self: LocalWorkers, threads: int) -> None:
        if threads != 1 or not can_fork():
            start_own(self, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_workers, "PythonProcess", start)
        patch.setattr(local_ranks, "PythonProcess", start_rank)
        patch.setattr(LocalWorkers, "start_fork_server", start_server)
        yield
