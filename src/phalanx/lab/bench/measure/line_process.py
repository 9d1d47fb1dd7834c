"""A process of a bench that answers each line with a line: arms that take turns, ranks that others are forked from."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.child import PythonProcess
from phalanx.closing import Closeable
from phalanx.errors import TrainingError

_SECONDS_TO_END = 15.0


class LineProcess(Closeable):
    """A module in its own process; its log is kept, and the last log line is in the error when it fails.

    Args:
        command: The module and its arguments.
        program: Program that runs the command; this interpreter, which is given a module, by default.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        program: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        self._name = name
        self._process = PythonProcess(command, environment, log, piped=True, program=program)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send it a line.

        Raises:
            TrainingError: It has ended.
        """
        stdin = self._process.popen.stdin
        try:
            if stdin is not None:
                stdin.write(line + "\n")
                stdin.flush()
        except BrokenPipeError as exc:
            raise self._failure() from exc

    def answer(self) -> str:
        """Wait for its next line.

        Raises:
            TrainingError: It has ended.
        """
        stdout = self._process.popen.stdout
        reply = "" if stdout is None else stdout.readline()
        if not reply:
            raise self._failure()
        return reply

    def close(self) -> None:
        """Let it end by itself, or end it."""
        stdin, stdout = self._process.popen.stdin, self._process.popen.stdout
        # that of a process that has ended is broken
        with contextlib.suppress(BrokenPipeError):
            if stdin is not None:
                stdin.close()
        self._process.end(_SECONDS_TO_END)
        if stdout is not None:
            stdout.close()

    def _failure(self) -> TrainingError:
        return TrainingError(f"bench: {self._name} ended: {self._process.last_output()}")


def in_environment(
    name: str, python: str, program: Sequence[str], environment: Mapping[str, str], log: Path
) -> LineProcess:
    """Start a program of a peer by the Python of an environment of its own; modules of this package are not its own."""
    return LineProcess(name, program, {**environment, "PYTHONPATH": ""}, log, (python, "-P"))
