"""The squared norm of a stage's gradient, as the message carries it."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.optimizers import gradient_norm_squared

_NORM_TOLERANCE = 1e-5
"""Relative, of squared norms that were added up in another order; the clip coefficient moves by half of it at most."""


def finite_norm_squared(gradients: Mapping[str, Tensor]) -> float | None:
    """Squared norm of all gradients together; None when it is not finite, for JSON has no word for that."""
    value = gradient_norm_squared(dict(gradients))
    return value if value < float("inf") else None


def same_norm(one: float | None, other: float | None, *, alike: bool) -> bool:
    """Whether two parties may both have got these squared norms from the same numbers."""
    if alike or one is None or other is None:
        return one == other
    return abs(one - other) <= _NORM_TOLERANCE * max(abs(one), abs(other))
