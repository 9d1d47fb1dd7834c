"""CPU seconds by purpose, from several threads."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """A meter that adds up the CPU time of the threads that measure with it; waiting costs nothing."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, purpose: str) -> Iterator[None]:
        """Add what the calling thread computes inside the block."""
        start = time.thread_time_ns()
        try:
            yield
        finally:
            spent = time.thread_time_ns() - start
            with self._lock:
                self._seconds[purpose] += spent

    def seconds(self, purpose: str) -> float:
        """Return the sum so far."""
        return self._seconds[purpose] * 1e-9
