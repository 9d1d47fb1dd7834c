"""Settings of the whole process that a run needs, given back when it ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Kernels that give the same bits again; the caller's own settings come back afterwards."""
    old = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(old[0])
        torch.use_deterministic_algorithms(old[1])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
