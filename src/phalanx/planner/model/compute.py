"""Floating-point operations of training, and the share of the peak that they are."""

from dataclasses import dataclass

from phalanx.planner.model.adapter import Adapter, adapter_numbers
from phalanx.planner.model.recipe import Checkpointing, Recipe
from phalanx.planner.model.shape import ModelShape

FORWARD, BACKWARD = 2, 4
"""Operations for each parameter of a matrix and token: a product and a sum forward, twice that backward."""


HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True)
class Flops:
    """Operations for one token, forward only, all ranks together.

    Attributes:
        scores: Attention's scores and mixing in one block; not halved for the causal mask.
    """

    block: int
    scores: int
    head: int


def forward_flops(shape: ModelShape, sequence_length: int) -> Flops:
    """Count one token's forward pass.

    Source: Kaplan et al. 2020, table 1; Chowdhery et al. 2022, appendix B, which counts attention in full too.
    """
    scores = 2 * FORWARD * sequence_length * shape.heads * shape.head_dim
    return Flops(FORWARD * shape.layer_matrix, scores, FORWARD * shape.head_matrix)


def model_flops(shape: ModelShape, sequence_length: int) -> int:
    """Operations that training one token takes: 6 a parameter, and attention; nothing computed twice."""
    flops = forward_flops(shape, sequence_length)
    return 3 * (shape.layers * (flops.block + flops.scores) + flops.head)


def training_flops(shape: ModelShape, recipe: Recipe) -> int:
    """Operations that training one token takes as a recipe has it; as `model_flops` where all weights are trained.

    Beside adapters a frozen matrix takes 4 a parameter, forward and back to its inputs, and no gradient of its own; an
    adapter takes 6, and attention's products as much as ever, for both of their factors have gradients.
    """
    if recipe.adapter is None:
        return model_flops(shape, recipe.sequence_length)
    flops = forward_flops(shape, recipe.sequence_length)
    thin = adapter_flops(shape, recipe.adapter)
    return shape.layers * (2 * flops.block + 3 * (flops.scores + thin)) + 2 * flops.head


def adapter_flops(shape: ModelShape, adapter: Adapter, tp: int = 1) -> int:
    """Operations of one block's adapters for one token, forward only, on one tensor parallel rank."""
    return FORWARD * adapter_numbers(shape, adapter, tp)


def backward_factor(checkpointing: Checkpointing) -> float:
    """Operations of a block's backward pass, in forward passes of it; recomputation of products included."""
    return 3.0 if checkpointing == "full" else 2.0


def flops_utilization(tokens_per_s: float, flops_per_token: float, num_devices: int, peak_flops: float) -> float:
    """Return model FLOPs utilization: useful operations over the devices' peak. Source: Chowdhery et al. 2022."""
    return tokens_per_s * flops_per_token / (num_devices * peak_flops)
