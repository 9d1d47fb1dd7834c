"""Averages of low-rank adapters that are averages of what the adapters do.

An adapter adds ``scale * B @ A`` to a weight. The mean of all B times the mean of all A is not the mean of the
products: the farther the sites' A drift apart, the more it is off. Stacked factors are the mean exactly; the singular
value decomposition brings them to a rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import ConfigError


class LowRank(NamedTuple):
    """One site's adapter of one weight.

    Attributes:
        a: ``[rank, inputs]``.
        b: ``[outputs, rank]``.
        scale: What their product is multiplied with.
    """

    a: Tensor
    b: Tensor
    scale: float


def mean_product(adapters: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Return the exact mean of what adapters add, with the sum of their ranks as rank and 1 as scale.

    Args:
        adapters: Of one weight; ranks may differ.
        weights: Of the sites, positive; they need not add up to one.

    Raises:
        ConfigError: There are none, or they are of different weights.
    """
    shapes = {(one.b.shape[0], one.a.shape[1]) for one in adapters}
    if len(shapes) != 1 or len(weights) != len(adapters) or min(weights) <= 0:
        raise ConfigError(f"adapters: {len(adapters)} with {len(weights)} weights, for weights of {len(shapes)} shapes")
    total = sum(weights)
    shares = [weight / total * one.scale for one, weight in zip(adapters, weights, strict=True)]
    a = torch.cat([one.a for one in adapters])
    return LowRank(a, torch.cat([share * one.b for one, share in zip(adapters, shares, strict=True)], dim=1), 1.0)


def to_rank(adapter: LowRank, rank: int, scale: float) -> LowRank:
    """Return the adapter of a rank that is nearest to another one, in the Frobenius norm; both factors share the size.

    The decomposition is of two small matrices, never of the weight. Where the rank is enough, nothing is lost.

    Source: Bai et al. 2024 (FlexLoRA), by QR of the factors.
    """
    left, upper = torch.linalg.qr(adapter.b.double())
    right, lower = torch.linalg.qr(adapter.a.double().T)
    u, values, vh = torch.linalg.svd(upper @ lower.T * (adapter.scale / scale))
    kept = min(rank, len(values))
    root = values[:kept].sqrt()
    b, a = left @ u[:, :kept] * root, root[:, None] * vh[:kept] @ right.T
    if kept < rank:
        b = torch.cat([b, b.new_zeros(len(b), rank - kept)], dim=1)
        a = torch.cat([a, a.new_zeros(rank - kept, a.shape[1])])
    return LowRank(a.to(adapter.a.dtype).contiguous(), b.to(adapter.b.dtype).contiguous(), scale)
