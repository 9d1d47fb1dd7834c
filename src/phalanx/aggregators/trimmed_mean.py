"""The mean of each value without its largest and smallest."""

import torch
from torch import Tensor

from phalanx.aggregators.rule import by_column


def trimmed_mean(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of each value after as many as may be Byzantine are cut off at either end.

    Source: Yin et al. 2018.
    """
    return by_column(updates, lambda part: torch.sort(part, dim=0).values[byzantine : len(part) - byzantine].mean(0))
