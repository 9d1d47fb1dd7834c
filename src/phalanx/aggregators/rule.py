"""The interface of robust rules, and the distances that several of them need."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import ConfigError

Rule = Callable[[Tensor, int], Tensor]
"""Takes updates ``[clients, values]``, finite, in a floating type, and how many of them may be Byzantine; returns one
update ``[values]``."""

CHUNK = 2**20
"""Values that are worked on at once where a rule looks at each by itself."""


@dataclass(frozen=True)
class Aggregator:
    """A robust rule and how much it stands.

    Attributes:
        most_byzantine: Largest number of Byzantine clients among so many clients.
    """

    rule: Rule
    max_byzantine: Callable[[int], int]
    source: str

    def __call__(self, updates: Tensor, byzantine: int) -> Tensor:
        """Aggregate after a look at whether the rule can do so.

        Raises:
            ConfigError: More may be Byzantine than the rule stands, or the updates are not as a rule takes them.
        """
        if updates.ndim != 2 or not len(updates) or not updates.is_floating_point():
            raise ConfigError(f"updates: {updates.dtype}{list(updates.shape)}, expected a float matrix, a row a client")
        if not 0 <= byzantine <= (max_byzantine := self.max_byzantine(len(updates))):
            raise ConfigError(
                f"byzantine = {byzantine} of {len(updates)} clients: this rule stands {max_byzantine} at most; "
                "lower it, ask more clients, or choose another rule"
            )
        if not torch.isfinite(updates).all():
            raise ConfigError("updates: one holds NaN or infinity; admission must refuse it before any statistics")
        return self.rule(updates, byzantine)


def below_half(clients: int) -> int:
    """Return the most Byzantine clients of a rule that stands less than half."""
    return (clients - 1) // 2


def inner_products(updates: Tensor) -> Tensor:
    """Return ``[clients, clients]`` inner products of the updates without their common middle, in float64.

    The middle is the median of each value: what most updates share then costs no precision, however large a few are.
    """
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for part in torch.split(updates, CHUNK, dim=1):
        centred = part.double() - part.median(0).values.double()
        gram += centred @ centred.T
    return gram


def squared_distances(updates: Tensor) -> Tensor:
    """Return ``[clients, clients]`` squared Euclidean distances, in float64."""
    gram = inner_products(updates)
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0).fill_diagonal_(0)


def weighted_mean(updates: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of updates with weights that need not add up to one."""
    return (weights / weights.sum()).to(updates.dtype) @ updates


def by_column(updates: Tensor, action: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply to each chunk of columns what looks at each column by itself."""
    return torch.cat([action(part) for part in torch.split(updates, CHUNK, dim=1)])
