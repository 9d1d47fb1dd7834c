"""Exact ring products on an accelerator: products of 8-bit limbs sum up exactly in 32-bit integers."""

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from phalanx.security.mask.ring import P, Ring, balanced_limbs, centred_integers, centred_residues, require_ring

if TYPE_CHECKING:
    import torch

_BITS = 8
MAX_INNER = (2**31 - 1) // (128 * 128)
"""Largest inner dimension: a 32-bit sum of products of two 8-bit limbs cannot overflow."""
_LEFT_LIMBS = 4
_MULTIPLE, _FEWEST_ROWS = 8, 17


class Int8Matrix:
    """A matrix as balanced limbs of 8 bits on a device of torch's.

    The kernel (``torch._int_mm``) wants more than 16 rows and the other two dimensions in multiples of 8: the matrix is
    padded with zeros.

    Args:
        values: Elements of the ring, in a form that `ring_matrix` takes.
        device: Torch's name of the device, such as ``cuda``.
    """

    def __init__(self, values: ArrayLike, device: str) -> None:
        import torch  # noqa: PLC0415

        integers = centred_integers(values)
        if len(integers) > MAX_INNER:
            raise ValueError(f"ring: inner dimension is {len(integers)}, expected at most {MAX_INNER} on {device}")
        self.shape = (integers.shape[0], integers.shape[1])
        self._device = device
        filled = np.zeros([_padded_size(size) for size in self.shape], np.int64)
        filled[: self.shape[0], : self.shape[1]] = integers
        self._limbs = [torch.from_numpy(limb.astype(np.int8)).to(device) for limb in balanced_limbs(filled, _BITS)]

    def left_multiply(self, z: Ring) -> Ring:
        """As `RingMatrix` says."""
        import torch  # noqa: PLC0415

        require_ring(z, (None, self.shape[0]))
        padded = torch.zeros((max(len(z), _FEWEST_ROWS), _padded_size(self.shape[0])), dtype=torch.int32)
        padded[: len(z), : self.shape[0]] = torch.from_numpy(centred_residues(z))
        total = self._multiply_limbs(_limbs_on_device(padded.to(self._device)))
        result = total[: len(z), : self.shape[1]].to("cpu", torch.int64).numpy()
        return np.ascontiguousarray(result.astype(np.uint32))

    def _multiply_limbs(self, left: "list[torch.Tensor]") -> "torch.Tensor":
        import torch  # noqa: PLC0415

        total: Any = 0
        for (i, a), (j, b) in product(enumerate(left), enumerate(self._limbs)):
            # 2^31 is 1 mod p, so no factor is more than 2^30 and no term more than 2^61
            factor = 2 ** (_BITS * (i + j) % 31)
            total = (total + torch._int_mm(a, b).to(torch.int64) * factor) % P
        result: torch.Tensor = total
        return result


def _limbs_on_device(values: "torch.Tensor") -> "list[torch.Tensor]":
    import torch  # noqa: PLC0415

    limbs, rest = [], values
    for _ in range(_LEFT_LIMBS):
        limb = ((rest + 128) & 255) - 128
        limbs.append(limb.to(torch.int8))
        rest = (rest - limb) >> _BITS
    return limbs


def _padded_size(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE
