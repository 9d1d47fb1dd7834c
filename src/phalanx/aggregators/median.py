"""The median of each value."""

import torch
from torch import Tensor

from phalanx.aggregators.rule import by_column


def median_update(updates: Tensor, byzantine: int) -> Tensor:
    """Return the median of each value; of an even number of clients the mean of the two in the middle.

    Source: Yin et al. 2018.
    """
    half = len(updates) // 2

    def middle(part: Tensor) -> Tensor:
        ordered = torch.sort(part, dim=0).values
        return ordered[half] if len(part) % 2 else (ordered[half - 1] + ordered[half]) / 2

    return by_column(updates, middle)
