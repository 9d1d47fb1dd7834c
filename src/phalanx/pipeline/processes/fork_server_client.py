"""The owner's end of a fork server: it requests workers and hears of their ends, without ever waiting for it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from phalanx.child import PARENT, ChildProcess, die_with_parent
from phalanx.pipeline.processes.fork_server import (
    FORK_SERVER,
    ForkRequest,
    WorkerEvent,
    is_single_threaded,
    serve_from_here,
)

_GONE = -9
_PATIENCE_S = 5.0


class ForkedWorker(ChildProcess):
    """One worker of a fork server."""

    def __init__(self, fork_server: "ForkServer", name: str) -> None:
        self._fork_server = fork_server
        self._name = name

    @property
    def pid(self) -> int | None:
        """Process id; None before the server has reported it."""
        return self._fork_server.pid_of(self._name)

    def poll(self) -> int | None:
        """Exit code; None while it runs, or is about to."""
        return self._fork_server.code_of(self._name)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None where it has not ended in time."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None and (remaining_s := deadline - time.monotonic()) > 0:
            self._fork_server.read_events(remaining_s)
        return code

    def _send_kill(self) -> None:
        self._fork_server.send_request(ForkRequest(name=self._name))


class ForkServer:
    """A process that forks workers; see `phalanx.pipeline.processes.fork_server`.

    Args:
        requests: Handle of a pipe to its standard input.
        answers: Handle of a pipe from it.
        threads: Threads of tensor kernels in its workers.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes] | _ForkedChild", requests: int, answers: int, threads: int
    ) -> None:
        self.threads = threads
        self._process = process
        self._requests: int | None = requests
        self._answers: int | None = answers
        self._events: dict[str, WorkerEvent | None] = {}
        self._unread = b""

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._process.poll() is None

    def start_worker(self, name: str, file: Path, log: Path) -> ForkedWorker:
        """Request a worker; it runs as soon as the server is ready."""
        self._events[name] = None
        self.send_request(ForkRequest(name=name, file=str(file), log=str(log)))
        return ForkedWorker(self, name)

    def pid_of(self, name: str) -> int | None:
        """Process id of a worker; None before the server has reported it."""
        self.read_events(0.0)
        event = self._events[name]
        return None if event is None else event.pid

    def code_of(self, name: str) -> int | None:
        """Exit code of a worker; None while it runs, or is about to."""
        self.read_events(0.0)
        event = self._events[name]
        code = None if event is None else event.code
        # no worker outlives the server
        return _GONE if code is None and not self.is_open else code

    def send_request(self, order: ForkRequest) -> None:
        """Send a request; one to a server that is gone does nothing."""
        if self._requests is not None and self.is_open:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, order.model_dump_json().encode() + b"\n")

    def read_events(self, timeout_s: float) -> None:
        """Take all reports there are; wait for one at most `timeout_s`."""
        while self._answers is not None and select.select([self._answers], [], [], timeout_s)[0]:
            received = os.read(self._answers, 2**16)
            if not received:
                self._close_answers()
                return
            timeout_s = 0.0
            *lines, self._unread = (self._unread + received).split(b"\n")
            for event_line in lines:
                news = WorkerEvent.model_validate_json(event_line)
                self._events[news.name] = news

    def close(self) -> None:
        """End it, and every worker with it, at once: it has nothing to finish. Closing twice is harmless."""
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        if self._requests is not None:
            # a handle that is closed again may be another file's by then
            os.close(self._requests)
            self._requests = None
        self._close_answers()

    def _close_answers(self) -> None:
        if self._answers is not None:
            os.close(self._answers)
            self._answers = None


def start_fork_server(command: Sequence[str], log: Path, threads: int, modules: Collection[str]) -> ForkServer:
    """Start a fork server as a program of its own, which imports everything first.

    Args:
        command: Module and arguments of a worker, without its file.
        log: Log of the server's own output.
        threads: Threads of tensor kernels in its workers.
    """
    (requests, to_server), (from_server, answers) = os.pipe(), os.pipe()
    threads_of_kernels = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", *command, FORK_SERVER],
            stdin=requests,
            stdout=answers,
            stderr=output,
            process_group=0,
            env={
                **os.environ,
                **threads_of_kernels,
                PARENT: str(os.getpid()),
                "PHALANX_PRELOAD": ",".join(modules),
            },
        )
    os.close(requests)
    os.close(answers)
    return ForkServer(process, to_server, from_server, threads)


def fork_here(command: Sequence[str], threads: int, serve: Callable[[Path], int]) -> ForkServer | None:
    """Make a fork server out of this process as it is now, with everything that it has imported.

    Call it before the process opens a connection or reads a key: workers inherit both.

    Args:
        command: Module and arguments of a worker, without its file, for one that cannot be forked.
        threads: Threads of tensor kernels in its workers.
        serve: Called with its file in each worker; returns the exit code.

    Returns:
        None where a library has started a thread: its locks would stay locked in every worker.
    """
    if not is_single_threaded():
        return None
    (requests, to_server), (from_server, answers) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = str(os.getpid())
    pid = os.fork()
    if pid == 0:
        os.close(to_server)
        os.close(from_server)
        os.environ.update({PARENT: parent, "OMP_NUM_THREADS": str(threads)})
        die_with_parent()
        serve_from_here(requests, answers, [sys.executable, "-m", *command], serve)
    os.close(requests)
    os.close(answers)
    return ForkServer(_ForkedChild(pid), to_server, from_server, threads)


class _ForkedChild:
    """A forked child, with the methods of `subprocess.Popen` that `ForkServer` needs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def poll(self) -> int | None:
        return self._wait_child(os.WNOHANG)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end, which `kill` has brought about: the kernel owes it, however busy it is."""
        del timeout
        return self._wait_child(0)

    def _wait_child(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code
