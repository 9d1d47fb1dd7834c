"""Named tensors as one vector, in the order of their names, and back."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.federated.algorithms import Named

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name, in order."""
    return {name: tuple(named[name].shape) for name in sorted(named)}


def num_values(shapes: Shapes) -> int:
    """Return how many numbers there are in all."""
    return sum(math.prod(shape) for shape in shapes.values())


def flatten(named: Mapping[str, Tensor]) -> Tensor:
    """Return all values as one vector; a copy."""
    return torch.cat([named[name].detach().reshape(-1) for name in sorted(named)])


def unflatten(vector: Tensor, shapes: Shapes) -> Named:
    """Return the tensors of a vector; views of it."""
    names = sorted(shapes)
    parts = torch.split(vector, [math.prod(shapes[name]) for name in names])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def norm_of(named: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all values."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2 for one in named.values()))
