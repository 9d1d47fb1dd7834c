"""A child: at most one ``phalanx`` process, which never outlives its keeper, and its notice to end."""

import signal
from collections.abc import Mapping
from types import FrameType

from phalanx.child import PythonProcess

LOST = -signal.SIGKILL
"""Exit code of a process of which nothing is known but that it is gone."""
_KILLED = 128


def exit_code(code: int) -> int:
    """What a shell makes of a process's end: 137 for one that SIGKILL ended."""
    return code if code >= 0 else _KILLED - code


class Child:
    """A process that is started, looked at and ended."""

    def __init__(self) -> None:
        self._process: PythonProcess | None = None

    @property
    def process_id(self) -> int | None:
        """Its process id, once it was started."""
        return None if self._process is None else self._process.pid

    def start_command(self, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        """Start ``phalanx`` with these arguments; whatever ran before is killed."""
        self.kill()
        self._process = PythonProcess(("phalanx", *arguments), environment)

    def poll(self) -> int | None:
        """Exit code; None while it runs, negative for a signal, `LOST` when nothing was started."""
        return LOST if self._process is None else self._process.poll()

    def ask_to_end(self) -> None:
        """Send SIGTERM: an owner stops, a worker hands over and leaves."""
        if self._process is not None:
            self._process.ask_to_end()

    def end_process(self) -> None:
        """Give it a moment to end by itself, then kill it."""
        if self._process is not None:
            self._process.end_or_kill()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()


class TerminationNotice:
    """A notice that this process was told to end."""

    def __init__(self) -> None:
        self.notice_count = 0
        self._old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> "TerminationNotice":
        for number in self._old:
            signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note_signal(self, signum: int, frame: FrameType | None) -> None:
        self.notice_count += 1
