"""Real numbers as small integers for products in Z_p: which scale, how rounded, how far off at most.

Every row of activations and every column of weights is scaled to one Euclidean length and rounded. A product of two
such vectors is at most the square of that length (Cauchy and Schwarz), and the square fits between -(p - 1) / 2 and
(p - 1) / 2: a product cannot overflow. Giving both sides the same length makes their rounding errors equal, which is
where their sum is least.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FixedPointError
from phalanx.security.mask.ring import HALF, Ring, block_slices, centred_residues, to_ring

LENGTH = math.isqrt(HALF)
"""Euclidean length that no quantised row and no quantised column exceeds."""
LARGEST = LENGTH**2
"""Largest absolute value of a product of two of them."""
MAX_INNER = 2**22
"""Largest inner dimension: beyond it rounding alone would be longer than a thirtieth of `LENGTH`."""

Reals = NDArray[np.float32]

# the length is computed in float64 from float32 numbers; this is more than can be off by there
_CARE = 1.0 - 2.0**-24
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class FixedRows:
    """Rows of activations or gradients in fixed point.

    Attributes:
        values: ``[rows, inner]``, elements of Z_p.
        scales: ``[rows]``; a quantised number is the real one times the scale of its row.
    """

    values: Ring = field(repr=False)
    scales: NDArray[np.float64] = field(repr=False)


@dataclass(frozen=True, eq=False)
class FixedColumns:
    """A weight matrix in fixed point.

    Attributes:
        values: ``[inner, columns]``, integers.
        scales: ``[columns]``; a quantised number is the real one times the scale of its column.
    """

    values: NDArray[np.int32]
    scales: NDArray[np.float64]


def encode_columns(weight: Reals, where: str = "weight") -> FixedColumns:
    """Quantise a weight matrix, rounding half to even.

    Args:
        weight: ``[inner, columns]``.

    Raises:
        FixedPointError: It is no float32 matrix, has too large an inner dimension, or holds NaN or infinity.
    """
    lengths = _vector_lengths(weight, 0, where)
    scales = _scaled_length(len(weight)) / lengths
    return FixedColumns(np.rint(weight * scales).astype(np.int32), scales)


def encode_rows(rows: Reals, bound: float | None = None, where: str = "activations") -> FixedRows:
    """Quantise activations or gradients, rounding half to even.

    Args:
        rows: ``[rows, inner]``.
        bound: The Euclidean length that one scale for all rows is chosen for; None gives each row the scale of its
            own length, which is never less accurate and cannot overflow.

    Raises:
        FixedPointError: They are no float32 matrix, hold NaN or infinity, or a row is longer than `bound`.
    """
    lengths = _vector_lengths(rows, 1, where)
    if bound is not None:
        if not (math.isfinite(bound) and bound > 0):
            raise FixedPointError(f"{where}: the bound is {bound}, expected a positive number")
        _check_bound(lengths, bound, where)
        lengths = np.full(len(rows), bound, np.float64)
    scales = _scaled_length(rows.shape[1]) / lengths
    values = np.empty(rows.shape, np.uint32)
    for block in block_slices(*rows.shape):
        scaled = rows[block] * scales[block, None]
        values[block] = to_ring(np.rint(scaled, out=scaled).astype(np.int32))
    return FixedRows(values, scales)


def decode_product(
    product: Ring, rows: NDArray[np.float64], columns: NDArray[np.float64], where: str = "product"
) -> Reals:
    """Return a product of quantised numbers as real numbers.

    Args:
        product: ``[rows, columns]``, elements of Z_p.

    Raises:
        FixedPointError: A number is larger than any product of quantised vectors can be, so it was unmasked with
            another pad or answers another request; or it is too large for float32.
    """
    result, row_steps, column_steps = np.empty(product.shape, np.float32), 1 / rows[:, None], 1 / columns
    # most scales are so far from float32's end that no product can be beyond it
    may_overflow = LARGEST * row_steps.max(initial=0.0) * column_steps.max(initial=0.0) >= _MAX_FLOAT32
    for block in block_slices(*product.shape):
        integers = centred_residues(product[block])
        if max(integers.max(initial=0), -integers.min(initial=0)) > LARGEST:
            raise FixedPointError(
                f"{where}: a number is beyond {LARGEST}, as no product is; it was not computed from what was sent"
            )
        scaled = integers * row_steps[block]
        scaled *= column_steps
        with np.errstate(over="ignore"):
            result[block] = scaled
    if may_overflow and not np.isfinite(result).all():
        raise FixedPointError(f"{where}: a number is too large for float32; scale weights or activations down")
    return result


def worst_error(inner: int) -> float:
    """Return how far a product can be off, as a share of the lengths of its row and its column multiplied.

    Rounding moves a scaled vector by sqrt(inner) / 2 at most. For rows with a scale of their own; where a `bound` was
    given, the bound takes the place of the row's length.
    """
    moved = math.sqrt(inner) / 2
    share = moved / _scaled_length(inner)
    return 2 * share + share**2


def typical_error(inner: int) -> float:
    """Return the root mean square of the same share, for rounding errors that are evenly spread and independent."""
    return math.sqrt(2 / 12) / _scaled_length(inner)


def _vector_lengths(matrix: Reals, axis: int, where: str) -> NDArray[np.float64]:
    """Euclidean lengths along an axis; 1 for vectors of zeros, which any scale serves."""
    if matrix.ndim != 2 or matrix.dtype != np.float32 or not matrix.size:
        raise FixedPointError(f"{where}: got {matrix.dtype} {list(matrix.shape)}, expected a float32 matrix")
    if matrix.shape[axis] > MAX_INNER:
        raise FixedPointError(f"{where}: inner dimension is {matrix.shape[axis]}, expected at most {MAX_INNER}")
    # squares of float32 numbers, denormal ones included, neither vanish nor overflow in float64
    subscripts = "ij,ij->j" if axis == 0 else "ij,ij->i"
    lengths: NDArray[np.float64] = np.sqrt(np.einsum(subscripts, matrix, matrix, dtype=np.float64))
    if not np.isfinite(lengths).all():
        index = int(np.flatnonzero(~np.isfinite(lengths))[0])
        raise FixedPointError(f"{where}: {'column' if axis == 0 else 'row'} {index} holds NaN or infinity")
    return np.where(lengths == 0.0, 1.0, lengths)


def _scaled_length(inner: int) -> float:
    """The length to scale to, so that rounding, which adds sqrt(inner) / 2 at most, cannot lead beyond `LENGTH`."""
    return LENGTH * _CARE - math.sqrt(inner) / 2


def _check_bound(lengths: NDArray[np.float64], bound: float, where: str) -> None:
    worst = int(lengths.argmax())
    if lengths[worst] > bound:
        raise FixedPointError(
            f"{where}: overflow: row {worst} has length {lengths[worst]:.4g}, the scale was chosen for {bound:.4g}; "
            "raise the bound, or let each row have its own scale"
        )
