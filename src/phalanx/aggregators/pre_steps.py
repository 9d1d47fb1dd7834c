"""Steps before a robust rule that bring honest updates nearer to each other."""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.aggregators.rule import squared_distances
from phalanx.errors import ConfigError

PreStep = Callable[[Tensor, int, torch.Generator], tuple[Tensor, int]]
"""Takes updates, how many may be Byzantine, and a source of chance; returns other updates and how many of those may be
Byzantine."""


def nearest_neighbour_mixing(updates: Tensor, byzantine: int, chance: torch.Generator) -> tuple[Tensor, int]:
    """Replace each update by the mean of the n - f that are nearest to it, itself among them.

    Raises:
        ConfigError: As many may be Byzantine as there are.

    Source: Allouah et al. 2023 (NNM).
    """
    num_near = len(updates) - byzantine
    if num_near < 1:
        raise ConfigError(f"byzantine = {byzantine} of {len(updates)} clients: nnm has nobody to mix; ask more clients")
    nearest = squared_distances(updates).sort(dim=1, stable=True).indices[:, :num_near]
    shares = torch.zeros(len(updates), len(updates), dtype=updates.dtype, device=updates.device)
    return shares.scatter_(1, nearest, 1 / num_near) @ updates, byzantine


def bucket_updates(updates: Tensor, byzantine: int, chance: torch.Generator) -> tuple[Tensor, int]:
    """Replace updates by the means of random pairs; of an odd number the last stays alone.

    Source: Karimireddy et al. 2022 (s = 2).
    """
    order = torch.randperm(len(updates), generator=chance).to(updates.device)
    return torch.stack([updates[pair].mean(0) for pair in torch.split(order, 2)]), byzantine
