"""How far two tensors of one message are apart, token by token, and in which band such a distance lies."""

from typing import Literal

import torch
from torch import Tensor

Band = Literal["honest", "grey", "alarm"]


def token_distance(claimed: Tensor, reference: Tensor) -> float:
    """Largest relative distance over tokens, so that a lie about one token cannot hide in a norm.

    Args:
        claimed: ``[batch, seq, dim]``, what a stage sent.
        reference: ``[batch, seq, dim]``, what was recomputed.

    Returns:
        ``max_t |x_t - y_t| / (|y_t| + 0.1 rms_t |y|)`` with x claimed, y reference, in float64;
        infinity when shapes differ or either holds NaN or infinity. Compare with ``not (e <= tau)``.
    """
    if claimed.shape != reference.shape:
        return float("inf")
    distance = token_distances(claimed, reference).max().item()
    return float(distance) if distance < float("inf") else float("inf")


def token_distances(claimed: Tensor, reference: Tensor) -> Tensor:
    """The distance of every token, ``[batch, seq]`` in float64; NaN where either tensor holds one.

    Args:
        claimed: ``[batch, seq, dim]``.
        reference: Of the same shape.
    """
    x, y = claimed.double(), reference.double()
    distances: Tensor = (x - y).norm(dim=-1) / _scale(y)
    return distances


def token_residual(claimed: Tensor, reference: Tensor) -> Tensor:
    """What is left of a message after recomputation, with its sign: ``[batch, seq, dim]`` in float64.

    Each token is divided by the scale that `token_distance` uses, so its norm is that token's distance.

    Args:
        claimed: ``[batch, seq, dim]``.
        reference: Of the same shape.
    """
    x, y = claimed.double(), reference.double()
    return (x - y) / _scale(y).unsqueeze(-1)


def band(distance: float, tolerance: float) -> Band:
    """Say what a distance allows to conclude.

    Args:
        distance: Of `token_distance`.
        tolerance: tau.

    Returns:
        "honest" up to tau, where a referee acquits; "alarm" beyond 2 tau, where of two claims at least one is
        off; "grey" between: an honest pair may differ so much, and only a more exact recomputation tells.
        NaN is an alarm.
    """
    if distance <= tolerance:
        return "honest"
    return "grey" if distance <= 2 * tolerance else "alarm"


def _scale(y: Tensor) -> Tensor:
    """``|y_t| + 0.1 rms_t |y|`` for every token."""
    norms = y.norm(dim=-1)
    scale: Tensor = norms + 0.1 * norms.square().mean().sqrt()
    return scale.clamp_min(torch.finfo(torch.float64).tiny)
