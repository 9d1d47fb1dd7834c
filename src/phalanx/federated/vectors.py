"""Updates of many sites as vectors, and averages of their low-rank factors: means of the adapters' products."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.federated.algorithms import Named

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name, in order."""
    return {name: tuple(named[name].shape) for name in sorted(named)}


def num_values(shapes: Shapes) -> int:
    """Return how many numbers there are in all."""
    return sum(math.prod(shape) for shape in shapes.values())


def flatten_tensors(named: Mapping[str, Tensor]) -> Tensor:
    """Return all values as one vector; a copy."""
    return torch.cat([named[name].detach().reshape(-1) for name in sorted(named)])


def unflatten_vector(vector: Tensor, shapes: Shapes) -> Named:
    """Return the tensors of a vector; views of it."""
    names = sorted(shapes)
    parts = torch.split(vector, [math.prod(shapes[name]) for name in names])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def norm_of(named: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all values."""
    return math.sqrt(
        sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in named.values())
    )


def seed_of(model: str) -> int:
    """Return the seed of a round's draws, by the digest of its weights: no site knew it when it joined."""
    return int(model[:15], 16)


class LowRank(NamedTuple):
    """One site's adapter of one weight.

    Attributes:
        a: ``[rank, inputs]``.
        b: ``[outputs, rank]``.
        scale: Factor of the product ``b @ a``.
    """

    a: Tensor
    b: Tensor
    scale: float


def mean_product(adapters: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Return the exact mean of what adapters add, with the sum of their ranks as rank and 1 as scale.

    Args:
        adapters: Adapters of one weight; ranks may differ.
        weights: Positive weights of the sites; they need not add up to one.
    """
    shapes = {(adapter.b.shape[0], adapter.a.shape[1]) for adapter in adapters}
    if len(shapes) != 1 or len(weights) != len(adapters) or min(weights) <= 0:
        raise ConfigError(f"adapters: {len(adapters)} with {len(weights)} weights, for weights of {len(shapes)} shapes")
    total = sum(weights)
    shares = [weight / total * adapter.scale for adapter, weight in zip(adapters, weights, strict=True)]
    a = torch.cat([adapter.a for adapter in adapters])
    return LowRank(
        a, torch.cat([share * adapter.b for adapter, share in zip(adapters, shares, strict=True)], dim=1), 1.0
    )


def to_rank(adapter: LowRank, rank: int, scale: float) -> LowRank:
    """Return the adapter of a rank that is nearest to another one, in the Frobenius norm; both factors share the size.

    The decomposition is of two small matrices, never of the weight. Where the rank is enough, nothing is lost.

    Source: Bai et al. 2024 (FlexLoRA), by QR of the factors.
    """
    q, upper = torch.linalg.qr(adapter.b.double())
    right, lower = torch.linalg.qr(adapter.a.double().T)
    u, values, vh = torch.linalg.svd(upper @ lower.T * (adapter.scale / scale))
    new_rank = min(rank, len(values))
    root = values[:new_rank].sqrt()
    b, a = q @ u[:, :new_rank] * root, root[:, None] * vh[:new_rank] @ right.T
    if new_rank < rank:
        b = torch.cat([b, b.new_zeros(len(b), rank - new_rank)], dim=1)
        a = torch.cat([a, a.new_zeros(rank - new_rank, a.shape[1])])
    return LowRank(a.to(adapter.a.dtype).contiguous(), b.to(adapter.b.dtype).contiguous(), scale)


_A, _B = ".lora_A.weight", ".lora_B.weight"


def mean_of_products(before: Mapping[str, Tensor], deltas: Sequence[Named], weights: Sequence[float]) -> Named:
    """Return the movement of the weights by which adapters compute the mean of the sites' adapters.

    Args:
        before: Weights that the updates are relative to; factors come in pairs.

    Guarantees:
        The product of each pair is the mean of the sites' products as nearly as the rank allows; the sites' ranks
        together are more than one adapter has. What is no factor moves by the mean.
    """
    total = sum(weights)
    update: Named = {}
    for name, now in before.items():
        if name.endswith(_A):
            pair = name.removesuffix(_A) + _B
            adapters = [LowRank(now + delta[name], before[pair] + delta[pair], 1.0) for delta in deltas]
            nearest = to_rank(mean_product(adapters, weights), len(now), 1.0)
            update |= {name: nearest.a - now, pair: nearest.b - before[pair]}
        elif not name.endswith(_B):
            means = [delta[name] * (weight / total) for delta, weight in zip(deltas, weights, strict=True)]
            update[name] = sum(means[1:], means[0])
    return update
