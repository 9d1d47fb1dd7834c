"""How long a thread has worked and how long it has wanted to, as its kernel counts it (Linux); the rest is waiting."""

import time
from dataclasses import dataclass
from pathlib import Path

_FILE = Path("/proc/thread-self/schedstat")
_NS = 1e-9


@dataclass(frozen=True)
class ThreadSample:
    """A moment of one thread.

    Attributes:
        wall_s: On the clock.
        taken_s: Seconds on a core, and in the queue for one, so far; None where the system does not tell.
    """

    wall_s: float
    taken_s: float | None

    @classmethod
    def now(cls) -> "ThreadSample":
        """This moment of the calling thread."""
        try:
            on_core, queued, *_ = _FILE.read_text(encoding="ascii").split()
            taken = (int(on_core) + int(queued)) * _NS
        except (OSError, ValueError):
            return cls(time.perf_counter(), None)
        return cls(time.perf_counter(), taken)

    def waited_since(self, before: "ThreadSample") -> float | None:
        """Seconds since another moment in which this thread waited for something else than a core."""
        if self.taken_s is None or before.taken_s is None:
            return None
        return max(0.0, self.wall_s - before.wall_s - (self.taken_s - before.taken_s))
