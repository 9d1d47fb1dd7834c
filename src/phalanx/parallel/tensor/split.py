"""Splits of parameters: the slice that a tensor parallel rank has, and how slices become the whole again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """A parameter that is cut along one dimension.

    Attributes:
        dim: The dimension.
        parts: Matrices that lie side by side in it, such as query, key and value; each is cut by itself.
    """

    dim: int
    parts: int = 1

    def take(self, whole: Tensor, index: int, count: int) -> Tensor:
        """Return slice `index` of `count`, in memory of its own."""
        pieces = [part.chunk(count, self.dim)[index] for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim)

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the whole that `take` cut; slices in the order of ranks."""
        cut = [piece.chunk(self.parts, self.dim) for piece in slices]
        return torch.cat([piece[part] for part in range(self.parts) for piece in cut], self.dim)
