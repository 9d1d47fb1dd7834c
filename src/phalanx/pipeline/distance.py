"""How far two tensors of one message are apart, token by token."""

import torch
from torch import Tensor


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
    x, y = claimed.double(), reference.double()
    norms = y.norm(dim=-1)
    scale = norms + 0.1 * norms.square().mean().sqrt()
    distance = ((x - y).norm(dim=-1) / scale.clamp_min(torch.finfo(torch.float64).tiny)).max().item()
    return float(distance) if distance < float("inf") else float("inf")
