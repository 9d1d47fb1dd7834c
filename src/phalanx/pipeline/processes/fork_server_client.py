"""The owner's end of a fork server: it requests workers and hears of their ends, without ever waiting for it."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from phalanx.child import PARENT, ChildProcess
from phalanx.pipeline.processes.fork_server import FORK_SERVER, ForkRequest, WorkerEvent

_GONE = -9
_PATIENCE_S = 5.0


class ForkedWorker(ChildProcess):
    """One worker of a fork server."""

    def __init__(self, fork_server: "ForkServer", name: str) -> None:
        self._fork_server = fork_server
        self._name = name

    def poll(self) -> int | None:
        """Exit code; None while it runs, or is about to."""
        return self._fork_server.code_of(self._name)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None where it has not ended in time."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None and (left := deadline - time.monotonic()) > 0:
            self._fork_server.listen(left)
        return code

    def _kill(self) -> None:
        self._fork_server.tell(ForkRequest(name=self._name))


class ForkServer:
    """A process that forks workers; see `phalanx.pipeline.processes.fork_server`.

    Args:
        command: Module and arguments of a worker, without its file.
        log: Where the server's own output goes.
        threads: Threads of tensor kernels in its workers.
        modules: What it imports beforehand.
    """

    def __init__(self, command: Sequence[str], log: Path, threads: int, modules: Collection[str]) -> None:
        self._codes: dict[str, int | None] = {}
        self._unread = b""
        threads_of_kernels = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-m", *command, FORK_SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                process_group=0,
                bufsize=0,
                env={
                    **os.environ,
                    **threads_of_kernels,
                    PARENT: str(os.getpid()),
                    "PHALANX_PRELOAD": ",".join(modules),
                },
            )

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._process.poll() is None

    def start(self, name: str, file: Path, log: Path) -> ForkedWorker:
        """Request a worker; it runs as soon as the server is ready."""
        self._codes[name] = None
        self.tell(ForkRequest(name=name, file=str(file), log=str(log)))
        return ForkedWorker(self, name)

    def code_of(self, name: str) -> int | None:
        """Exit code of a worker; None while it runs, or is about to."""
        self.listen(0.0)
        code = self._codes[name]
        # no worker outlives the server
        return _GONE if code is None and not self.is_open else code

    def tell(self, order: ForkRequest) -> None:
        """Send a request; one to a server that is gone does nothing."""
        if self._process.stdin is not None and self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(order.model_dump_json().encode() + b"\n")

    def listen(self, timeout_s: float) -> None:
        """Take all reports there are; wait for one at most `timeout_s`."""
        stdout = self._process.stdout
        while stdout is not None and not stdout.closed and select.select([stdout], [], [], timeout_s)[0]:
            received = os.read(stdout.fileno(), 2**16)
            if not received:
                stdout.close()
                return
            timeout_s = 0.0
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                news = WorkerEvent.model_validate_json(line)
                self._codes[news.name] = news.code

    def close(self) -> None:
        """End it, and every worker with it, at once: it has nothing to finish."""
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
