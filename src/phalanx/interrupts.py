"""Ctrl-C and SIGTERM end a run between two of its records, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class _Interrupts:
    """What the main thread is in the midst of; only its own code and its signal handlers touch this."""

    def __init__(self) -> None:
        self.sections = 0
        self.is_pending = False

    def handle_signal(self, signum: int, frame: object) -> None:
        self.is_pending = self.sections > 0
        if not self.is_pending:
            raise KeyboardInterrupt

    def leave_section(self) -> None:
        self.sections -= 1
        if self.is_pending and self.sections == 0:
            self.is_pending = False
            raise KeyboardInterrupt


_INTERRUPTS = _Interrupts()


@contextlib.contextmanager
def allow_interrupts() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, and both wait for the end of `hold_interrupts` blocks; main thread only.

    The caller's own handlers come back afterwards. A handler of Ctrl-C that is not Python's own stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    old = {number: signal.signal(number, _INTERRUPTS.handle_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block, for what must be done wholly or not at all.

    Raises:
        KeyboardInterrupt: At the end of the outermost block, where one came meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _INTERRUPTS.sections += 1
    try:
        yield
    finally:
        _INTERRUPTS.leave_section()
