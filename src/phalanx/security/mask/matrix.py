"""A matrix that is made ready for exact products: on this processor in float64, elsewhere in 8-bit limbs."""

from typing import Protocol

from numpy.typing import ArrayLike

from phalanx.security.mask.ring import FloatMatrix, Ring


class RingMatrix(Protocol):
    """A matrix that was made ready to be multiplied with from the left, many times."""

    shape: tuple[int, int]
    """(inner, columns)."""

    def left_multiply(self, z: Ring) -> Ring:
        """Return ``z @ self mod p``.

        Args:
            z: ``[rows, inner]``, elements of Z_p.

        Raises:
            FrameError: `z` is of another type or shape, or contains a number that is no element of Z_p.
        """


def ring_matrix(values: ArrayLike, device: str = "cpu") -> RingMatrix:
    """Make the right factor of products ready.

    Args:
        values: ``[inner, columns]`` integers between -(p - 1) and p - 1.
        device: ``cpu`` for float64 products, anything else is torch's name of a device for products of 8-bit limbs.
    """
    if device == "cpu":
        return FloatMatrix(values)
    from phalanx.security.mask.int8_limbs import Int8Matrix  # noqa: PLC0415 - torch is for accelerators

    return Int8Matrix(values, device)
