"""Frozen linear layers on an untrusted machine, which sees uniform numbers only; messages, but no transport.

The client hides x as ``z = x + r mod p``, the worker returns ``z W mod p``, and the client takes ``r W mod p`` away.
For the backward pass the same is done with gradients and the transposed matrix. W is frozen, and public.

Source: Tramer and Boneh 2019 (Slalom), with a prime field, two check vectors and a backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError
from phalanx.security.mask.fixed_point import FixedColumns, Reals, decode_product, encode_columns, encode_rows
from phalanx.security.mask.freivalds import ProductCheck, ProductChecker
from phalanx.security.mask.matrix import RingMatrix, ring_matrix
from phalanx.security.mask.message import Direction, MaskedMessage, ProductMessage, check_answer
from phalanx.security.mask.pads import MAX_ELEMENTS, PadSource
from phalanx.security.mask.pool import PadPool
from phalanx.security.mask.ring import Ring, add_mod_p, subtract_mod_p


class MaskedWorker:
    """The untrusted side: multiplies received matrices with its loaded ones.

    Args:
        device: Device, in a form that `ring_matrix` takes.
        max_numbers: Numbers that one product may have; a request is smaller than its product where a matrix is wide.
    """

    def __init__(self, device: str = "cpu", max_numbers: int = MAX_ELEMENTS) -> None:
        self._device, self._max_numbers = device, max_numbers
        self._matrices: dict[ProductMessage, RingMatrix] = {}

    def load_matrix(self, product: ProductMessage, values: NDArray[np.int32]) -> None:
        """Keep a quantised matrix, ``[inner, columns]``."""
        self._matrices[product] = ring_matrix(values, self._device)

    def answer_request(self, request: MaskedMessage) -> MaskedMessage:
        """Multiply."""
        matrix = self._matrices.get(request.product)
        if matrix is None:
            raise FrameError(f"{request.product}: is not loaded here; load it before it is asked for")
        rows, columns = len(request.values), matrix.shape[1]
        if rows * columns > self._max_numbers:
            raise FrameError(
                f"{request.product}: the product has {rows} x {columns} numbers, expected {self._max_numbers} at most; "
                "ask with fewer rows"
            )
        return MaskedMessage(request.product, request.number, matrix.left_multiply(request.values))


@dataclass(frozen=True, eq=False)
class PendingProduct:
    """The client's record of a request under way.

    Attributes:
        unmask: ``[rows, columns]``, the product of the pad.
        scales: ``[rows]``, of the rows.
    """

    request: MaskedMessage
    unmask: Ring = field(repr=False)
    scales: NDArray[np.float64] = field(repr=False)


@dataclass(frozen=True, eq=False)
class MaskedProduct:
    """The trusted side of one product.

    Attributes:
        weight: Matrix in fixed point; its `values` are loaded by a worker.
        bound: Bound of the rows, as in `encode_rows`.
    """

    product: ProductMessage
    weight: FixedColumns = field(repr=False)
    pool: PadPool
    check: ProductChecker
    bound: float | None = None

    def mask_rows(self, x: Reals) -> PendingProduct:
        """Quantise and mask.

        Args:
            x: ``[rows, inner]``: activations forward, gradients backward.

        Raises:
            FixedPointError: It is no such matrix, holds NaN or infinity, or a row is longer than the bound.
            PadError: No pad is ready, or the pads have fewer rows.
        """
        rows = encode_rows(x, self.bound, str(self.product))
        unmask = self.pool.take_pad(len(x))
        return PendingProduct(
            MaskedMessage(self.product, unmask.number, add_mod_p(rows.values, unmask.pad)), unmask.product, rows.scales
        )

    def unmask_answer(self, sent: PendingProduct, answer: MaskedMessage) -> Reals:
        """Check and unmask.

        Returns:
            ``x @ W``, ``[rows, columns]``, off by at most `worst_error` of the lengths of row and column.

        Raises:
            FrameError: The answer is malformed or to another request.
            WrongProductError: The answer is not the product of the request.
            FixedPointError: A number is too large for float32.
        """
        values = check_answer(sent.request, answer, self.weight.values.shape[1])
        self.check.require_product(sent.request.values, values, f"{self.product}, pad {sent.request.number}")
        return decode_product(subtract_mod_p(values, sent.unmask), sent.scales, self.weight.scales, str(self.product))


@dataclass(frozen=True)
class LinearProducts:
    """The trusted side of a frozen linear layer.

    Attributes:
        forward: ``x @ W``.
        backward: ``dy @ W^T``, which gives the gradient of x; W itself has none.
    """

    forward: MaskedProduct
    backward: MaskedProduct


def masked_linear(
    layer: str, weight: Reals, rows: int, pads: Callable[[ProductMessage], PadSource], bound: float | None = None
) -> LinearProducts:
    """Prepare both directions of a layer.

    Args:
        weight: ``[inner, columns]``, that is, transposed from what torch's linear layers keep.
        pads: Makes fresh pads for a product; also gives each check its secret vectors.
        bound: Bound of activations, as in `encode_rows`; gradients always have scales of their own rows.
    """

    def one(direction: Direction, matrix: Reals, bound: float | None) -> MaskedProduct:
        product = ProductMessage(layer, direction)
        fixed, source = encode_columns(matrix, str(product)), pads(product)
        check = ProductCheck(fixed.values, source)
        return MaskedProduct(product, fixed, PadPool(product, fixed.values, source, rows), check, bound)

    return LinearProducts(one("forward", weight, bound), one("backward", np.ascontiguousarray(weight.T), None))
