"""Calls into transformers and peft: one thread at a time, without notes and progress bars."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from transformers.utils import logging as hub_logging

# both patch torch itself while they build and load: two threads that overlap can leave the patch of one in place
_LOCK = threading.RLock()


def one_at_a_time() -> AbstractContextManager[object]:
    """Keep other threads out, for what must not meet a patch of torch but prints nothing."""
    return _LOCK


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep other threads out, let only errors through, hide progress bars; all is as before afterwards."""
    with _LOCK, _silence_libraries():
        yield


@contextmanager
def _silence_libraries() -> Iterator[None]:
    verbosity = hub_logging.get_verbosity()
    bars = hub_logging.is_progress_bar_enabled()
    hub_logging.set_verbosity_error()
    hub_logging.disable_progress_bar()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if bars:
            hub_logging.enable_progress_bar()
