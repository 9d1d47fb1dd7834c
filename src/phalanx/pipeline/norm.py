"""The squared norm of a stage's gradient, as the message carries it."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.optimizers import gradient_norm_squared


def finite_norm_squared(gradients: Mapping[str, Tensor]) -> float | None:
    """Squared norm of all gradients together; None when it is not finite, for JSON has no word for that."""
    value = gradient_norm_squared(dict(gradients))
    return value if value < float("inf") else None
