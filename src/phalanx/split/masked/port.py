"""Ports to the workers that multiply masked numbers, and a worker in this very process."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.security.mask import MaskedMessage, MaskedWorker, ProductMessage
from phalanx.security.mask.pads import MAX_ELEMENTS


class WorkerPort(Protocol):
    """The trusted side's way to one worker."""

    name: str
    """How errors call the worker."""
    max_numbers: int
    """Numbers that one request and one answer may have."""

    def load_matrix(self, product: ProductMessage, values: NDArray[np.int32]) -> None:
        """Give the worker a quantised matrix, ``[inner, columns]``."""

    def multiply_masked(self, requests: Sequence[MaskedMessage]) -> list[MaskedMessage]:
        """Ask for products, all at once; nothing about the answers is checked here but which request they are to."""


class SimulatedWorker:
    """A worker in the trusted side's own process, for tests and for measuring: it hides nothing from any code in it.

    Args:
        device: Device; see `ring_matrix`.
    """

    def __init__(self, name: str = "simulated worker", device: str = "cpu") -> None:
        self.name, self.max_numbers = name, MAX_ELEMENTS
        self._worker = MaskedWorker(device)

    def load_matrix(self, product: ProductMessage, values: NDArray[np.int32]) -> None:
        """As `WorkerPort` says."""
        self._worker.load_matrix(product, values)

    def multiply_masked(self, requests: Sequence[MaskedMessage]) -> list[MaskedMessage]:
        """As `WorkerPort` says."""
        return [self._worker.answer_request(request) for request in requests]
