"""The validity of layouts: which can work at all, why not, and the nearest one that does."""

import math
from collections.abc import Iterator
from dataclasses import replace

from phalanx.planner.layout import AXES, CONTEXTS, Layout, all_layouts, axis_distance
from phalanx.planner.model.adapter import describe_adapter_refusal
from phalanx.planner.model.families import FAMILIES, SharedAxis
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES

HIGHEST_ZERO = 3
_GRADIENTS_SHARED = 2


def describe_refusal(layout: Layout, shape: ModelShape, recipe: Recipe) -> str | None:
    """Say why a layout cannot train a model.

    Args:
        recipe: Training recipe, of which only batch and adapter count.

    Returns:
        The first reason with the figures it rests on and what to change, or None for a layout that works. Memory
        is not judged here.
    """
    return next(_refusal_reasons(layout, shape, recipe), None)


def nearest_valid_layout(layout: Layout, shape: ModelShape, recipe: Recipe) -> Layout | None:
    """Return the valid layout that is nearest to one that is not.

    Args:
        layout: Requested layout; returned itself when it works.
        recipe: Training recipe, as in `describe_refusal`.

    Returns:
        The one that is fewest doublings away along its axes and in its ranks, which are never more; of equally near
        ones that with the most ranks. Copies that train apart stay apart. None when not even one rank can.
    """
    if layout.num_ranks >= 1 and describe_refusal(layout, shape, recipe) is None:
        return layout
    target = replace(layout, **{axis: max(1, getattr(layout, axis)) for axis in AXES})
    zero = min(max(layout.zero, 0), HIGHEST_ZERO)
    best: Layout | None = None
    for world in range(target.num_ranks, 0, -1):
        # fewer ranks are so many doublings away, once along their axes and once in their number
        if best is not None and 2 * math.log2(target.num_ranks / world) >= layout_distance(best, target):
            break
        for candidate in (grouped for bare in all_layouts(world, (zero,)) for grouped in _group_layouts(bare, target)):
            if best is not None and layout_distance(candidate, target) >= layout_distance(best, target):
                continue
            if describe_refusal(candidate, shape, recipe) is None:
                best = candidate
    return best


def _group_layouts(bare: Layout, wanted: Layout) -> Iterator[Layout]:
    """Yield a layout with the islands that were asked for, and with as many groups or none."""
    islands = wanted.islands
    if islands > 1:
        islands = bare.dp if islands == wanted.dp else islands
        if islands == 1:
            return
    for replicas in sorted({1, max(1, wanted.replicas)}):
        yield replace(bare, islands=max(1, islands), replicas=replicas)


def layout_distance(layout: Layout, wanted: Layout) -> float:
    """Return the distance of a layout from the requested one; fewer ranks count beside the axes that have them."""
    return axis_distance(layout, wanted) + math.log2(wanted.num_ranks / layout.num_ranks)


def _refusal_reasons(layout: Layout, shape: ModelShape, recipe: Recipe) -> Iterator[str]:
    yield from _wrong_numbers(layout, recipe)
    yield from _wrong_batch(layout, recipe)
    yield from _wrong_groups(layout)
    yield from _wrong_sharing(layout, shape)
    yield from _wrong_tensors(layout, shape)
    yield from _wrong_sequence(layout, shape, recipe.sequence_length)
    yield from _wrong_ring(layout, shape, recipe.sequence_length)
    yield from _wrong_pipeline(layout, shape, recipe.microbatches)
    adapted = None if recipe.adapter is None else describe_adapter_refusal(shape, recipe.adapter, layout.tp)
    if adapted is not None:
        yield adapted


def _wrong_numbers(layout: Layout, recipe: Recipe) -> Iterator[str]:
    for axis in AXES:
        if getattr(layout, axis) < 1:
            yield f"{axis}={getattr(layout, axis)}: expected a whole number of at least 1"
    if not 0 <= layout.zero <= HIGHEST_ZERO:
        yield f"zero={layout.zero}: expected 0, 1, 2 or 3"
    if layout.schedule not in SCHEDULES:
        yield f"schedule={layout.schedule}: expected one of {', '.join(SCHEDULES)}"
    if layout.context not in CONTEXTS:
        yield f"context={layout.context}: expected one of {', '.join(CONTEXTS)}"
    if layout.stages_per_rank < 1:
        yield f"chunks={layout.chunks}: expected a whole number of at least 1"
    for name in ("sequences", "microbatches", "sequence_length"):
        if getattr(recipe, name) < 1:
            yield f"{name}={getattr(recipe, name)}: expected a whole number of at least 1"


def _wrong_batch(layout: Layout, recipe: Recipe) -> Iterator[str]:
    if recipe.sequences % (layout.dp * recipe.microbatches):
        yield (
            f"dp={layout.dp} * {recipe.microbatches} microbatches does not divide {recipe.sequences} sequences a step; "
            "change dp, the microbatches or the batch size"
        )


def _wrong_groups(layout: Layout) -> Iterator[str]:
    for name in ("replicas", "islands"):
        if getattr(layout, name) < 1:
            yield f"{name}={getattr(layout, name)}: expected a whole number of at least 1"
    if layout.dp % layout.islands:
        yield f"islands={layout.islands} does not divide dp={layout.dp}; change one of them"
    if layout.islands > 1 and layout.zero and layout.num_partners == 1:
        yield (
            f"zero={layout.zero} shares what the copies of an island have, and with islands={layout.islands} of "
            f"dp={layout.dp} there is one; raise dp, or set zero to 0"
        )
    if layout.replicas == 1:
        return
    if layout.zero < _GRADIENTS_SHARED:
        yield f"replicas={layout.replicas} needs zero=2 or 3, found zero={layout.zero}; leave replicas out"
    if layout.dp // layout.islands % layout.replicas:
        suffix = f" on {layout.islands} islands" if layout.islands > 1 else ""
        yield f"replicas={layout.replicas} does not divide dp={layout.dp}{suffix}; change one of them"
    if layout.num_shards == 1:
        yield f"replicas={layout.replicas} leaves each group one copy, which shares nothing; lower it, or set zero to 0"


def _wrong_sharing(layout: Layout, shape: ModelShape) -> Iterator[str]:
    shared = FAMILIES[shape.family].shared_axes
    ranks: dict[SharedAxis, int] = {"tp": layout.tp, "cp": layout.cp}
    for axis, number in ranks.items():
        if number > 1 and axis not in shared:
            yield f"{axis}={number}: ranks cannot share a block of {shape.family} yet; set {axis} to 1, raise dp or pp"


def _wrong_tensors(layout: Layout, shape: ModelShape) -> Iterator[str]:
    parts = {"attention heads": shape.heads, "key and value heads": shape.kv_heads}
    parts |= {"experts": shape.experts} if shape.experts else {"columns of the MLP": shape.ffn}
    for name, number in parts.items():
        if number % layout.tp:
            yield f"tp={layout.tp} does not divide {number} {name}; lower tp"
    if layout.context == "ring":
        return
    # by Ulysses ranks exchange whole heads against parts of the sequence
    for name, number in list(parts.items())[:2]:
        if number % (layout.tp * layout.cp):
            yield f"tp={layout.tp} * cp={layout.cp} does not divide {number} {name}; lower cp"


def _wrong_sequence(layout: Layout, shape: ModelShape, sequence_length: int) -> Iterator[str]:
    if sequence_length % layout.cp:
        yield f"cp={layout.cp} does not divide a sequence of {sequence_length} tokens; change one of them"
    if shape.max_positions is not None and sequence_length > shape.max_positions:
        yield f"a sequence of {sequence_length} tokens is longer than the model's {shape.max_positions} positions"


def _wrong_ring(layout: Layout, shape: ModelShape, sequence_length: int) -> Iterator[str]:
    if layout.context != "ring":
        return
    if layout.cp == 1:
        yield "context=ring is for context parallel ranks, and cp=1; raise cp or leave context out"
    elif sequence_length % (2 * layout.cp):
        yield (
            f"context=ring cuts a sequence into 2 * cp={2 * layout.cp} chunks, which do not divide {sequence_length} "
            "tokens; change one of them, or take context=ulysses"
        )
    if FAMILIES[shape.family].biased_scores:
        yield (
            f"context=ring: {shape.family} adds a bias to its scores, which a ring does not carry; take context=ulysses"
        )
    if shape.windows:
        yield (
            f"context=ring: layers of {shape.family} may have sliding windows, which kernels of a ring do not know; "
            "take context=ulysses, or a model whose config says that it has none"
        )
    if shape.attention_dropout > 0:
        yield (
            f"context=ring drops nothing in attention, and the model's config asks for {shape.attention_dropout:g}; "
            "set that to 0, or take context=ulysses"
        )


def _wrong_pipeline(layout: Layout, shape: ModelShape, microbatches: int) -> Iterator[str]:
    if layout.pp == 1:
        return
    schedule = SCHEDULES[layout.schedule]
    stages = layout.pp * layout.stages_per_rank
    if stages > shape.layers:
        yield (
            f"pp={layout.pp} with {layout.stages_per_rank} stages a rank needs {stages} layers, "
            f"the model has {shape.layers}; lower pp"
        )
    if schedule.chunks > 1 and microbatches % layout.pp:
        yield (
            f"schedule={layout.schedule} needs a multiple of pp={layout.pp} microbatches, got {microbatches}; "
            "change the microbatches"
        )
    if not schedule.fills_first and microbatches < layout.pp:
        yield (
            f"schedule={layout.schedule} needs at least pp={layout.pp} microbatches, got {microbatches}; "
            "raise the microbatches or take gpipe"
        )
    if schedule.splits_backward and microbatches % max(1, microbatches // layout.pp):
        yield (
            f"schedule={layout.schedule} goes round in {microbatches // layout.pp} turns, which do not divide "
            f"{microbatches} microbatches; take a multiple of pp={layout.pp}"
        )
    if schedule.splits_backward and layout.zero > _GRADIENTS_SHARED:
        yield (
            f"schedule={layout.schedule} with zero={layout.zero}: parameters are shared out again before their "
            "gradients are computed; take zero=2, 1f1b or interleaved"
        )
    if schedule.chunks > 1 and layout.stages_per_rank == 1:
        plain = "zero-bubble" if schedule.splits_backward else "1f1b"
        yield f"schedule={layout.schedule} with one stage a rank is {plain}; set chunks to 2 or more"
