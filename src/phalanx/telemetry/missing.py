"""The lines that an owner prints while it waits for parties: who is missing, and for how long it waits."""

import time
from collections.abc import Callable, Collection

from phalanx.config import join_names, printable_text

_REPEAT_S = 15.0
_MAX_CHANGES = 100
"""Changes that are printed at once: a host of another machine could name other parties in each of its answers."""
_MAX_CHARACTERS = 80


class MissingNotice:
    """Says which parties are missing: when that changes, and again after a quarter of a minute.

    Args:
        timeout_s: How long they are waited for, from now on.
        expected: Those of whom it was said already that they are waited for.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        timeout_s: float,
        expected: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self._deadline = clock() + timeout_s
        self._missing = frozenset(expected)
        self._next = clock() + _REPEAT_S
        self._num_changes = 0

    def waits_for(self, missing: Collection[str]) -> None:
        """Take the parties that are missing now; asked as often as the caller likes."""
        now = self._clock()
        is_new = frozenset(missing) != self._missing and self._num_changes < _MAX_CHANGES
        if not missing or not (is_new or now >= self._next):
            return
        self._num_changes += is_new
        self._missing, self._next = frozenset(missing), now + _REPEAT_S
        names = join_names([printable_text(name, _MAX_CHARACTERS) for name in sorted(missing)])
        left_s = max(0.0, self._deadline - now)
        self._say(f"still waiting for {names}; at most {left_s:.0f} s more")
