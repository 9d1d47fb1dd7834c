"""The time of day against which certificates are checked: read once, counted on from there."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path


def seconds_since_boot() -> float:
    """Seconds of a clock that cannot be set; time in which the machine sleeps counts where the system tells."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def boot_name() -> str | None:
    """Return a name of the current boot of the machine; None where the system has no such name.

    Two files that one boot has written, one after the other, are both there as long as its name stays the same,
    whether they were forced to disk or not.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


class SteadyClock:
    """A clock that reads the wall clock when it is made and never again.

    Args:
        elapsed: Seconds of a clock that cannot be set.

    Guarantees:
        A wall clock that is set, however far, while this process runs makes no certificate expire and none valid.
    """

    def __init__(self, wall: Callable[[], datetime], elapsed: Callable[[], float]) -> None:
        self._elapsed = elapsed
        self._start, self._start_s = wall(), elapsed()

    def current_time(self) -> datetime:
        """The time of day, in UTC."""
        return self._start + timedelta(seconds=self._elapsed() - self._start_s)


_CLOCK = SteadyClock(lambda: datetime.now(UTC), seconds_since_boot)


def steady_now() -> datetime:
    """The time of day by the clock of this process."""
    return _CLOCK.current_time()
