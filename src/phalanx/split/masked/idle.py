"""Pads made in idle time: a thread fills an offload client's pools whenever pads were taken."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Self

from phalanx.errors import PhalanxError
from phalanx.split.masked.config import MaskedConfig
from phalanx.split.masked.offload_client import MaskingClient
from phalanx.split.masked.pad_sources import pad_sources
from phalanx.split.masked.port import WorkerPort

_LOOK_EVERY_S = 0.2
_SECONDS_TO_END = 10.0


class PadFiller:
    """A thread that keeps a number of pads ready at an offload client; a context manager.

    The products of matrices leave Python's lock alone, so this runs while a step waits for its worker, and takes
    nothing from it but the processor. With a second worker the thread only draws pads and waits for answers.
    """

    def __init__(self, offload: MaskingClient, reserve: int) -> None:
        self._offload, self._reserve = offload, reserve
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_filled, name="idle-pads", daemon=True)
        self.full = threading.Event()
        """Set while every product has its reserve, as far as this thread has seen."""
        self.ended = threading.Event()
        """Set when the thread has stopped, by itself or because it was told to."""
        self.failure: PhalanxError | None = None
        """Why it stopped; pads are then made, or refused, where they are needed, and the reason shows there as well."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(_SECONDS_TO_END)

    def _keep_filled(self) -> None:
        try:
            self._fill_reserve()
            while not self._is_over.is_set():
                if self._offload.pads_wanted.wait(_LOOK_EVERY_S):
                    self._offload.pads_wanted.clear()
                    self.full.clear()
                    self._fill_reserve()
        except PhalanxError as exc:
            self.failure = exc
        finally:
            self.ended.set()

    def _fill_reserve(self) -> None:
        # one of each at a time: a product that is out of pads must not wait for the reserve of all others
        for count in range(1, self._reserve + 1):
            if self._is_over.is_set():
                return
            self._offload.fill_pools(count)
        self.full.set()


@contextlib.contextmanager
def open_masking_client(
    config: MaskedConfig,
    run: str,
    worker: WorkerPort,
    second: WorkerPort | None = None,
) -> Iterator[MaskingClient]:
    """Give the offload client that a config asks for, with a thread that fills its pools.

    Args:
        config: Kind and number of pads.
        second: Makes the pads' products, where the config says so.
    """
    offload = MaskingClient(worker, pad_sources(config, run), config, second)
    with PadFiller(offload, config.reserve):
        yield offload
