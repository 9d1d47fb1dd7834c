"""Distances of two tensors of one message, token by token, or of two weight gradients, parameter by parameter."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Band = Literal["honest", "grey", "alarm"]


def token_distance(claimed: Tensor, reference: Tensor) -> float:
    """Largest relative distance over tokens, so that a lie about one token cannot hide in a norm.

    Args:
        claimed: The stage's message, ``[batch, seq, dim]``.
        reference: The recomputed message, ``[batch, seq, dim]``.

    Returns:
        ``max_t |x_t - y_t| / (|y_t| + 0.1 rms_t |y|)`` with x claimed, y reference, in float64;
        infinity when shapes differ or either holds NaN or infinity. Compare with ``not (e <= tau)``.
    """
    if claimed.shape != reference.shape:
        return float("inf")
    distance = token_distances(claimed, reference).max().item()
    return float(distance) if distance < float("inf") else float("inf")


def distance_to_truth(claimed: Tensor, truth: Tensor) -> float:
    """As `token_distance`; 0 where the owner's own numbers overflow, for rounding decides there which of them do."""
    return token_distance(claimed, truth) if bool(truth.isfinite().all()) else 0.0


def token_distances(claimed: Tensor, reference: Tensor) -> Tensor:
    """The distance of every token, ``[batch, seq]`` in float64; NaN where either tensor holds one.

    Args:
        claimed: ``[batch, seq, dim]``.
    """
    x, y = claimed.double(), reference.double()
    distances: Tensor = (x - y).norm(dim=-1) / _token_scale(y)
    return distances


def token_residual(claimed: Tensor, reference: Tensor) -> Tensor:
    """Return the residual of a message after recomputation, with its sign: ``[batch, seq, dim]`` in float64.

    Each token is divided by the scale that `token_distance` uses, so its norm is that token's distance.

    Args:
        claimed: ``[batch, seq, dim]``.
    """
    x, y = claimed.double(), reference.double()
    return (x - y) / _token_scale(y).unsqueeze(-1)


def gradient_distance(claimed: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Largest relative distance over the parameters of a stage.

    Args:
        claimed: Weight gradients by name, as a stage committed to them.

    Returns:
        ``max_p |x_p - y_p| / (|y_p| + 0.1 sqrt(n_p) rms |y|)`` with x claimed, y reference, n_p the size of a
        parameter and the rms over all numbers of y, in float64; infinity when names or shapes differ or either
        holds NaN or infinity. The second term is for gradients that are zero but for rounding, such as a key's bias.
    """
    if {name: t.shape for name, t in claimed.items()} != {name: t.shape for name, t in reference.items()}:
        return float("inf")
    pairs = {name: (claimed[name].double().cpu(), tensor.double().cpu()) for name, tensor in reference.items()}
    squares = math.fsum(float(y.square().sum()) for _, y in pairs.values())
    rms = math.sqrt(squares / max(1, sum(y.numel() for _, y in pairs.values())))
    worst = 0.0
    for x, y in pairs.values():
        scale = float(y.norm()) + 0.1 * math.sqrt(y.numel()) * rms
        distance = float((x - y).norm()) / max(scale, torch.finfo(torch.float64).tiny)
        if not distance < float("inf"):
            return float("inf")
        worst = max(worst, distance)
    return worst


def classify_distance(distance: float, tolerance: float) -> Band:
    """Classify a distance.

    Args:
        distance: Result of `token_distance`.

    Returns:
        "honest" up to tau, where a referee acquits; "alarm" beyond 2 tau, where of two claims at least one is
        off; "grey" between: an honest pair may differ so much, and only a more exact recomputation tells.
        NaN is an alarm.
    """
    if distance <= tolerance:
        return "honest"
    return "grey" if distance <= 2 * tolerance else "alarm"


def _token_scale(y: Tensor) -> Tensor:
    """``|y_t| + 0.1 rms_t |y|`` for every token."""
    norms = y.norm(dim=-1)
    scale: Tensor = norms + 0.1 * norms.square().mean().sqrt()
    return scale.clamp_min(torch.finfo(torch.float64).tiny)
