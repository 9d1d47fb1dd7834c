"""The positions of a sequence that each context parallel rank has."""

import torch
from torch import Tensor

from phalanx.parallel.config import ParallelConfig


def own_positions(whole: Tensor, dim: int, config: ParallelConfig, rank: int) -> Tensor:
    """Return what one context parallel rank has of a tensor with all positions of a sequence.

    Ulysses gives each rank a slice. In a ring the later half of a sequence would see most keys and the first rank would
    wait for the last: there a rank has one of twice as many chunks from the front, and its mirror image from the back.

    Args:
        whole: Any tensor; a table may have dimension 0 of size 1.
        dim: Of the positions, which the ranks divide, in a ring twice.
        config: The layout.
        rank: Which one.
    """
    if config.cp == 1:
        return whole
    if config.context == "ulysses":
        return whole.chunk(config.cp, dim)[rank]
    chunks = whole.chunk(2 * config.cp, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)
