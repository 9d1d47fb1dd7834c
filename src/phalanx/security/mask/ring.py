"""Exact matrix products in Z_p, p = 2^31 - 1, out of float64 ones.

Elements are unsigned 32-bit integers below p. A product is taken of *centred* residues, |z| <= (p - 1) / 2: a float64
holds every integer up to 2^53, so a sum of products is exact in any order, fused or not, as long as the sum of the
absolute values of its terms stays below that. What this allows is computed from the matrix, not assumed.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.errors import FrameError

P = 2**31 - 1
"""The modulus, a prime."""
HALF = P // 2
"""Largest absolute value of a centred residue."""
LIMIT = 2**53 - P
"""Largest absolute value that `reduce_mod_p` takes: the multiple of p next to it is still exact in float64."""
MAX_INNER = LIMIT // (2 * HALF)
"""Largest inner dimension of a product of any two matrices: its limbs then have 2 bits."""

Ring = NDArray[np.uint32]
"""Elements of Z_p in [0, p)."""

_INVERSE = 1.0 / P
_BLOCK = 2**15
_NARROW, _TALL = 64, 256
_FEW = 4096
"""Sums up to which calls cost more than numbers."""


class FloatMatrix:
    """A matrix as limbs in float64: one where its columns are small enough, more where they are not."""

    def __init__(self, values: ArrayLike) -> None:
        integers = centred_integers(values)
        self.shape = (integers.shape[0], integers.shape[1])
        self.limb_bits = 0 if _is_exact(integers) else limb_bits(self.shape[0])
        limbs = balanced_limbs(integers, self.limb_bits) if self.limb_bits else [integers]
        if not all(_is_exact(limb) for limb in limbs):
            raise ValueError(f"ring: limbs of {self.limb_bits} bits are not exact at inner dimension {self.shape[0]}")
        self.num_limbs = len(limbs)
        self._limbs = np.ascontiguousarray(np.concatenate(limbs, axis=1), dtype=np.float64)

    def left_multiply(self, z: Ring) -> Ring:
        """As `RingMatrix` says."""
        inner, columns = self.shape
        require_ring(z, (None, inner))
        product = np.empty((len(z), columns), np.uint32)
        rows = max(8, 4 * _BLOCK // max(inner, 1)) if self._limbs.shape[1] <= _NARROW else _TALL
        for start in range(0, len(z), rows):
            sums = centred_residues(z[start : start + rows]).astype(np.float64) @ self._limbs
            product[start : start + rows] = self._join_limbs(sums)
        return product

    def _join_limbs(self, sums: NDArray[np.float64]) -> Ring:
        """Horner's rule over the limbs, most significant one first."""
        columns = self.shape[1]
        if sums.size <= _FEW:
            return self._joined_few(sums.astype(np.int64))
        parts = [sums[:, i * columns : (i + 1) * columns] for i in range(self.num_limbs)]
        total = parts.pop()
        while parts:
            high = centred_residues(reduce_mod_p(total)).astype(np.float64)
            total = high * float(2**self.limb_bits) + reduce_mod_p(parts.pop())
        return reduce_mod_p(total)

    def _joined_few(self, sums: NDArray[np.int64]) -> Ring:
        """The same by 64-bit division: slower for each number, and far fewer calls."""
        columns = self.shape[1]
        total = sums[:, (self.num_limbs - 1) * columns :]
        for i in reversed(range(self.num_limbs - 1)):
            # below 2^31 * 2^16 + 2^53
            total = (total % P << self.limb_bits) + sums[:, i * columns : (i + 1) * columns]
        return (total % P).astype(np.uint32)


def require_ring(values: Ring, shape: tuple[int | None, int]) -> None:
    """Check an array that another party sent before anything is computed with it.

    Args:
        shape: Required shape; None allows any number of rows.

    Raises:
        FrameError: Another type or shape than expected, or a number that is no element of Z_p.
    """
    actual = list(getattr(values, "shape", ()))
    fits = len(actual) == 2 and actual[1] == shape[1] and shape[0] in (None, actual[0])
    if not isinstance(values, np.ndarray) or values.dtype != np.uint32 or not fits:
        kind = getattr(values, "dtype", type(values).__name__)
        expected = ["any" if size is None else size for size in shape]
        raise FrameError(f"ring: got {kind} {actual}, expected uint32 {expected}".replace("'any'", "any"))
    if values.size and values.max() >= P:
        raise FrameError(f"ring: a number is {P} or more, expected elements of Z_p below it")


def centred_integers(values: ArrayLike) -> NDArray[np.int64]:
    """Return a matrix of integers as centred residues."""
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "iu" or array.shape[0] == 0:
        raise ValueError(f"ring: got {array.dtype} {list(array.shape)}, expected a matrix of integers")
    if array.size and (int(array.max()) >= P or int(array.min()) <= -P):
        raise ValueError(f"ring: a number is {P} or more in absolute value")
    integers = array.astype(np.int64)
    integers -= P * (integers > HALF)
    integers += P * (integers < -HALF)
    return integers


def limb_bits(inner: int) -> int:
    """Return the width of the limbs with which products with any matrix of this inner dimension are exact.

    A balanced limb of b bits is at most 2^(b-1) in absolute value, so a sum stays within
    ``HALF * 2^(b-1) * inner``.
    """
    if not 1 <= inner <= MAX_INNER:
        raise ValueError(f"ring: inner dimension is {inner}, expected 1 to {MAX_INNER}")
    return min(16, (LIMIT // (HALF * inner)).bit_length())


def size_in_limbs(inner: int, columns: int) -> int:
    """Return the bytes that a matrix of 16-bit numbers takes at most, as int32 and as limbs in float64.

    Raises:
        ValueError: No product with so many rows of a matrix is exact.
    """
    # balanced digits of 17 bits hold every number of 16 with its sign
    return inner * columns * (4 + 8 * -(-17 // limb_bits(inner)))


def balanced_limbs(values: NDArray[np.int64], bits: int) -> list[NDArray[np.int64]]:
    """Split integers into digits of base 2^bits, each in [-2^(bits-1), 2^(bits-1)), the least significant first."""
    limbs: list[NDArray[np.int64]] = []
    rest, half = values, 2 ** (bits - 1)
    while rest.any() or not limbs:
        limb = ((rest + half) & (2**bits - 1)) - half
        limbs.append(limb)
        rest = (rest - limb) >> bits
    return limbs


def to_ring(values: NDArray[np.int32]) -> Ring:
    """Return integers between -p and p, both left out, as elements of Z_p."""
    return (values + ((values >> 31) & P)).view(np.uint32)


def centred_residues(values: Ring) -> NDArray[np.int32]:
    """Return the residues between -(p - 1) / 2 and (p - 1) / 2."""
    # bit 30 as the sign of a number of 31 bits; one more, since p is 2^31 - 1
    signed = (values << 1).view(np.int32) >> 1
    signed -= signed >> 31
    return signed


def add_mod_p(a: Ring, b: Ring) -> Ring:
    """Return ``a + b mod p``."""
    total: Ring = a + b
    np.minimum(total, total - np.uint32(P), out=total)
    return total


def subtract_mod_p(a: Ring, b: Ring) -> Ring:
    """Return ``a - b mod p``."""
    # below zero it wraps around to more than 2^31, and adding p wraps it back
    total: Ring = a - b
    np.minimum(total, total + np.uint32(P), out=total)
    return total


def reduce_mod_p(sums: NDArray[np.float64]) -> Ring:
    """Return integers that float64 holds, at most `LIMIT` in absolute value, as elements of Z_p.

    The quotient, rounded to the nearest integer, is off by one only where the remainder is within 4 of p / 2. So the
    remainder is below p in absolute value, and every number on the way is an integer that float64 holds.
    """
    out = np.empty(sums.shape, np.uint32)
    for rows in block_slices(*sums.shape):
        block = sums[rows]
        quotient = block * _INVERSE
        np.rint(quotient, out=quotient)
        quotient *= P
        np.subtract(block, quotient, out=quotient)
        out[rows] = to_ring(quotient.astype(np.int32))
    return out


def block_slices(rows: int, width: int) -> Iterator[slice]:
    """Cut rows into blocks that stay in the cache; 64-bit numbers take twice that."""
    step = max(1, _BLOCK // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def _is_exact(values: NDArray[np.int64]) -> bool:
    """Whether a float64 holds every sum of products of centred residues with a column, whatever they are."""
    return bool(HALF * int(np.abs(values).sum(axis=0).max(initial=0)) <= LIMIT)
