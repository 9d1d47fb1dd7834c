"""Requests to end this process: they are counted, and the process acts on them when it checks the count."""

import signal
from types import FrameType


class TerminationNotice:
    """Remembers that this process was told to end.

    Attributes:
        given: How often.
    """

    def __init__(self) -> None:
        self.given = 0
        self._old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> "TerminationNotice":
        for number in self._old:
            signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.given += 1
