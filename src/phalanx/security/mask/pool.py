"""Pads together with their products, made before they are needed: in idle time here, or by a second worker.

The product of a pad costs as much as the product that is offloaded. Either the trusted side has time when nothing
waits for it, or a second worker does that work and sees the pads alone; it must not talk to the first one.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError, PadError
from phalanx.security.mask.freivalds import ProductChecker
from phalanx.security.mask.matrix import RingMatrix, ring_matrix
from phalanx.security.mask.message import MaskedMessage, ProductMessage, check_answer
from phalanx.security.mask.pads import PadSource
from phalanx.security.mask.ring import Ring


@dataclass(frozen=True, eq=False)
class PadProduct:
    """A pad and its product.

    Attributes:
        pad: ``[rows, inner]``, r.
        product: ``[rows, columns]``, ``r W mod p``.
    """

    number: int
    pad: Ring = field(repr=False)
    product: Ring = field(repr=False)


class PadPool:
    """Pads for one product, each handed out once; may be filled by one thread and taken from by another.

    Args:
        weight: ``[inner, columns]`` integers.
        rows: Rows of each pad, the largest number that one request may have; unused rows are thrown away.
    """

    def __init__(self, product: ProductMessage, weight: NDArray[np.int32], pads: PadSource, rows: int) -> None:
        self._product, self._weight, self._pads, self.rows = product, weight, pads, rows
        self._ready: deque[PadProduct] = deque()
        self._asked: dict[int, MaskedMessage] = {}
        self._matrix: RingMatrix | None = None

    def __len__(self) -> int:
        """Pads that are ready."""
        return len(self._ready)

    def make_pad(self) -> None:
        """Make a pad and its product here: one whole matrix product on the trusted side."""
        if self._matrix is None:
            self._matrix = ring_matrix(self._weight)
        pad = self._pads.draw_pad(self.rows, self._weight.shape[0])
        values = pad.take_values()
        self._ready.append(PadProduct(pad.number, values, self._matrix.left_multiply(values)))

    def request_pad(self) -> MaskedMessage:
        """Make a pad, and the message that asks the second worker for its product.

        A party that sees both this message and the first worker's request sees the plain factor: send it to the second
        worker alone, under encryption.
        """
        pad = self._pads.draw_pad(self.rows, self._weight.shape[0])
        request = MaskedMessage(self._product, pad.number, pad.take_values())
        self._asked[request.number] = request
        return request

    def accept_product(self, answer: MaskedMessage, check: ProductChecker) -> None:
        """Take the second worker's answer; a refused answer costs its pad."""
        request = self._asked.pop(answer.number, None)
        if request is None:
            raise FrameError(f"{self._product}: got a product of pad {answer.number}, which was not asked for")
        values = check_answer(request, answer, self._weight.shape[1])
        check.require_product(request.values, values, f"{self._product}, pad {request.number}")
        self._ready.append(PadProduct(request.number, request.values, values))

    def take_pad(self, rows: int) -> PadProduct:
        """Hand out a pad, cut to so many rows; it is gone from here."""
        if rows > self.rows:
            raise PadError(f"{self._product}: {rows} rows are to be masked, pads have {self.rows}; make larger pads")
        if not self._ready:
            raise PadError(f"{self._product}: no pad is ready, and nothing is sent without; fill the pool first")
        product = self._ready.popleft()
        return PadProduct(product.number, product.pad[:rows], product.product[:rows])

    def __repr__(self) -> str:
        return f"PadPool({self._product}, rows={self.rows}, ready={len(self)})"
