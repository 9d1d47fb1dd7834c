"""Clip by the norm of the whole gradient while its parts lie in different processes."""

import math
from collections.abc import Mapping

import torch

from phalanx.errors import NonFiniteLossError

# as in torch.nn.utils.clip_grad_norm_
_EPS = 1e-6


def gradient_norm_squared(gradients: Mapping[str, torch.Tensor]) -> float:
    """Squared Euclidean norm of one stage's gradient; the sum over all stages is that of the whole gradient.

    Norms per tensor in float32, squared and added in float64 in the order of the names, so two holders of the
    same gradient get the same number. NaN or infinity when the gradient holds one.
    """
    total = 0.0
    for name in sorted(gradients):
        norm = float(torch.linalg.vector_norm(gradients[name].detach(), dtype=torch.float32))
        total += norm * norm
    return total


def clip_coefficient(total_norm: float, clip_norm: float | None) -> float:
    """What every gradient is multiplied by, at most 1, so that the whole norm is at most `clip_norm`.

    Raises:
        NonFiniteLossError: The norm is NaN, infinite or negative, whether clipping is on or not.
    """
    if not (math.isfinite(total_norm) and total_norm >= 0.0):
        raise NonFiniteLossError(
            f"gradient norm is {total_norm}; nothing was updated; lower optimizer.lr, or use train.precision='fp32'"
        )
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (total_norm + _EPS))
