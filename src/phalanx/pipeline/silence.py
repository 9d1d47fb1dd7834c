"""How long nothing has happened, and how long that may last."""

import time

_HONEST_TIMES = 4.0


class Silence:
    """Measures the gaps between messages; a gap is too long when no honest step had one nearly as long.

    Args:
        patience_s: A gap that is never too long, seconds.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._longest_honest_s = 0.0
        self._longest_s = 0.0
        self._was_broken = False
        self._since = time.monotonic()

    def begin(self) -> None:
        """A step, or an attempt at one, begins."""
        self._since = time.monotonic()
        self._longest_s, self._was_broken = 0.0, False

    def heard(self) -> None:
        """Something has happened."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._since)
        self._since = now

    def broken(self) -> None:
        """Somebody was asked: this attempt's gaps say nothing about honest ones."""
        self._since = time.monotonic()
        self._was_broken = True

    def end(self) -> None:
        """The step was decided."""
        if not self._was_broken:
            self._longest_honest_s = max(self._longest_honest_s, self._longest_s)

    @property
    def too_long(self) -> bool:
        """Whether the present gap is longer than patience and four times the longest honest one."""
        return time.monotonic() - self._since > max(self._patience_s, _HONEST_TIMES * self._longest_honest_s)
