"""Child processes: on a leash to their starter, ended by their ids, in good order or at once."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

PARENT = "PHALANX_PARENT"
"""Environment variable with the process id of a child's starter."""

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0


class ChildProcess(ABC):
    """A process that was started here and is ended here."""

    @abstractmethod
    def poll(self) -> int | None:
        """Exit code; None while it runs, negative for a signal."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None where it has not ended in time."""

    @abstractmethod
    def _kill(self) -> None:
        """Have it ended at once; its end need not be seen yet."""

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            self._kill()
            self.wait(_SECONDS_TO_END)

    def end(self, timeout_s: float = _SECONDS_TO_END) -> None:
        """Give it, which has been told to end, a moment; then kill it."""
        if self.wait(timeout_s) is None:
            self.kill()

    def how_it_ended(self) -> str:
        """In words, for a message."""
        code = self.poll()
        if code is None:
            return "it has not ended"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


class PythonProcess(ChildProcess):
    """A child that runs a module; a terminal's Ctrl-C is for its starter, which ends it in good order.

    Args:
        command: The module and its arguments.
        environment: Variables beside the starter's.
        log: Gets its output; where it is left out, that is the starter's.
        renew: Whether the log begins anew.
        piped: Whether standard input and output are pipes for lines of text; the log then gets standard error alone.
        program: What runs the command; this interpreter, which is given a module, where it is left out.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        *,
        renew: bool = False,
        piped: bool = False,
        program: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        self._log = log
        output = None if log is None else log.open("wb" if renew else "ab")
        try:
            self.popen = subprocess.Popen(  # noqa: S603 - our own interpreter and our own command
                [*program, *command],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output if piped or output is None else subprocess.STDOUT,
                text=True,
                process_group=0,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    def poll(self) -> int | None:
        """Exit code; None while it runs, negative for a signal."""
        return self.popen.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None where it has not ended in time."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            self.popen.terminate()

    def last_output(self, num_lines: int = 1) -> str:
        """The last lines of its log, for an error message."""
        return "(no output)" if self._log is None else last_lines(self._log, num_lines)

    def _kill(self) -> None:
        self.popen.kill()


def last_lines(log: Path, num_lines: int = 1, otherwise: str = "(no output)") -> str:
    """The last lines of a log in one, for an error message; `otherwise` where there are none."""
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return " | ".join(text.splitlines()[-num_lines:]) or otherwise


def bound_memory(more_bytes: int) -> None:
    """Let this process take so many bytes more than it has, and leave no core file behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        bound = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    # a parent that ended while this process was still starting is found by its number
    parent = os.environ.get(PARENT, str(os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:
        os.write(2, b"the process that started this one has ended\n")
        os._exit(1)
