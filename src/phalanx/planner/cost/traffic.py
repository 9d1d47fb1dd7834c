"""Bytes that a rank sends in a step to those that have other sequences, by how far they go."""

from dataclasses import dataclass

from phalanx.planner.cost.diloco_cost import outer_numbers, sent_bytes
from phalanx.planner.cost.memory import ParameterCounts, held_parameters, rank_parameters, stage_layers
from phalanx.planner.layout import Layout
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape

SHARED_GRADIENTS = 2
"""Lowest ZeRO level at which gradients are shared."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of the rank that sends most, by the fewest that any collective can do with.

    Attributes:
        copies: Gradients and parameters, among those that share or would hold equal copies.
        groups: Gradients, between groups that are replicas of each other.
        islands: What islands have moved; of a step, on average.
    """

    copies: float
    groups: float
    islands: float


def traffic(shape: ModelShape, layout: Layout, recipe: Recipe) -> Traffic:
    """Count what a rank sends; tensor, context and pipeline parallel ranks are not among it."""
    held = most_held(shape, layout, recipe)
    gradients, others = held.trained * recipe.weight_bytes, (layout.shards - 1) / layout.shards
    if layout.zero < SHARED_GRADIENTS:
        copies = others * gradients * (3 if layout.zero == 1 else 2)
    else:
        scatters, gathers = num_calls(layout, recipe)
        gathered = gathers * held.stored
        if layout.zero > SHARED_GRADIENTS and layout.pp == 1:
            # what is outside blocks stays whole from its forward to its backward pass
            gathered -= recipe.microbatches * rank_parameters(shape, layout, 0, 0)
        copies = others * (scatters * gradients + gathered * recipe.inner_bytes)
    groups = 2 * (layout.replicas - 1) / layout.replicas * gradients / layout.shards
    islands = 0.0
    if recipe.outer is not None and layout.islands > 1:
        numbers = outer_numbers(held.trained, layout)
        islands = sent_bytes(numbers, layout.islands, recipe.outer) / recipe.outer.every
    return Traffic(copies, groups, islands)


def num_calls(layout: Layout, recipe: Recipe) -> tuple[int, int]:
    """Return how often gradients are summed in a step, and parameters gathered, with ZeRO 2 or 3.

    Gathered once for the first forward pass, or for both passes of every microbatch; a pipeline lets parameters be
    whole from a backward pass to the next forward pass, and sums once.
    """
    late = layout.shares_late
    if layout.zero == SHARED_GRADIENTS:
        return 1 if late else recipe.microbatches, 1
    return (1, recipe.microbatches + 1) if late else (recipe.microbatches, 2 * recipe.microbatches)


def most_held(shape: ModelShape, layout: Layout, recipe: Recipe) -> ParameterCounts:
    """Parameters of the pipeline rank that has most, before ZeRO shares them."""
    counts = stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)
    ranks = (held_parameters(shape, layout, recipe, sum(counts[rank :: layout.pp]), rank) for rank in range(layout.pp))
    return max(ranks, key=lambda held: held.stored)
