"""Clocks of silence: how long nothing has happened, and how long that may last."""

import time
from collections import deque

_HONEST_TIMES = 4.0
_STEPS_REMEMBERED = 100
_KNOCK_SHARE = 1 / 3
_LONGEST_LOOK_AWAY_S = 1.0


class Awake:
    """An owner's monotonic clock; the time that others are held to stands still while its reader does not look at it.

    An owner that was stopped, swapped out or starved cannot tell how long others were silent meanwhile: of the time
    between two looks no more than a second counts. A listening owner looks many times a second.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._awake_s = 0.0

    def now(self) -> float:
        """Seconds awake so far."""
        now = time.monotonic()
        self._awake_s += min(now - self._last, _LONGEST_LOOK_AWAY_S)
        self._last = now
        return self._awake_s

    def wall(self) -> float:
        """Seconds, those not looked at included: for how long the whole of something may take."""
        return time.monotonic()


class Patience:
    """A measurement of the gaps between messages; a gap is too long when no recent honest step had one nearly as long.

    Args:
        patience_s: A gap that is never too long, seconds; four times as long is always too long.
        clock: Where time is read.

    Attributes:
        clock: The same.

    Guarantees:
        A party that makes every step slow, each a little more than the last, does not make the limit rise for ever.
    """

    def __init__(self, patience_s: float, clock: Awake) -> None:
        self.patience_s = patience_s
        self.clock = clock
        self._honest: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._longest_s, self._was_broken, self._has_knocked = 0.0, False, False
        self._since = clock.now()

    def begin(self) -> None:
        """A step, or an attempt at one, begins."""
        self._longest_s, self._was_broken = 0.0, False
        self._restart()

    def heard(self) -> None:
        """Something has happened."""
        self._longest_s = max(self._longest_s, self.clock.now() - self._since)
        self._restart()

    def broken(self) -> None:
        """Note that a party was asked for its progress: this attempt's gaps say nothing about honest ones."""
        self._was_broken = True
        self._restart()

    def end(self) -> None:
        """The step was decided."""
        if not self._was_broken:
            self._honest.append(self._longest_s)

    @property
    def limit_s(self) -> float:
        """Four times the longest gap of the last honest steps, but at least patience and at most four times that."""
        longest_s = min(max(self._honest, default=0.0), self.patience_s)
        return max(self.patience_s, _HONEST_TIMES * longest_s)

    @property
    def too_long(self) -> bool:
        """Whether the present gap is longer than the limit."""
        return self.clock.now() - self._since > self.limit_s

    @property
    def too_long_for_anything(self) -> bool:
        """Whether the present gap is longer than any limit, where honest ones are not known: while roles change."""
        return self.clock.now() - self._since > _HONEST_TIMES * self.patience_s

    def is_time_to_probe(self) -> bool:
        """Whether a third of the limit has gone by; true once in a gap."""
        if self._has_knocked or self.clock.now() - self._since <= _KNOCK_SHARE * self.limit_s:
            return False
        self._has_knocked = True
        return True

    def _restart(self) -> None:
        self._since, self._has_knocked = self.clock.now(), False
