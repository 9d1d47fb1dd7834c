"""The mean: best without attackers, and one attacker moves it wherever it likes."""

from torch import Tensor


def mean_update(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of all updates."""
    return updates.mean(0)
