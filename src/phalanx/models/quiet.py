"""Transformers' notes and progress bars switched off for the length of one call."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as hub_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let only errors through, hide progress bars; both are as before afterwards, whatever happens."""
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
