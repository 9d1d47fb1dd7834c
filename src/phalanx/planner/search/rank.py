"""All layouts of a cluster, the valid ones in order of merit, the others with their reason."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.errors import ConfigError
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cost.estimate import Estimate, describe_excess, effective_recipe, estimate_layout, usable_bytes
from phalanx.planner.cost.memory import RankMemory, worst_rank
from phalanx.planner.cost.mixed import estimate_mixed, mixed_layouts, place_pipeline
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.model.recipe import Checkpointing, Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES
from phalanx.planner.search.candidates import candidate_layouts, describe_island_mismatch
from phalanx.planner.validity import describe_refusal

By = Literal["speed", "cost"]
PLAYED = 24
"""Number of the best layouts that are simulated; the order behind them rests on formulas."""

ERROR = 0.1
"""Relative difference of two planned step times below which neither is the faster. Of pairs of layouts that were
measured as well, the planned ratio was off by more than this in half of them (`parallel-cpu-2cores-quick.json`)."""
_ZERO = (0, 3, 1, 2)

TOO_LARGE = "no order of the devices has the memory for its layers"

_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that cannot be used, and why.

    Attributes:
        excess: Memory that it needs over what there is, where that is the reason; None for any other.
    """

    layout: Layout
    reason: str
    excess: float | None = None


@dataclass(frozen=True)
class Ranking:
    """A ranking of every layout; the best first."""

    valid: tuple[Estimate, ...]
    refused: tuple[RefusedLayout, ...]


def rank_layouts(
    shape: ModelShape,
    recipe: Recipe,
    cluster: Cluster,
    num_devices: int,
    *,
    tokens: float | None = None,
    guard: Verification | None = None,
    by: By = "speed",
    fixed: Layout | None = None,
    own: Layout | None = None,
) -> Ranking:
    """Rank all layouts of so many devices.

    Args:
        recipe: Training recipe; microbatches, checkpointing and sequence parallelism are chosen for each layout.
        num_devices: Number of the cluster's devices.
        guard: Verification of workers; None verifies nothing.
        by: ``speed`` puts the most tokens a second first, ``cost`` the fewest device-seconds a token: they differ
            only between different numbers of devices.
        fixed: The only layout to judge.
        own: Judge this one too, if it has so many ranks.
    """
    if len(cluster.pools) > 1:
        return _rank_mixed(shape, recipe, cluster, tokens)
    valid: list[Estimate] = []
    refused: list[RefusedLayout] = []
    every = candidate_layouts(num_devices, cluster.per_node, recipe.outer, own)
    for layout in [fixed] if fixed is not None else every:
        result = _best_recipe(shape, layout, recipe, cluster, tokens, guard)
        if isinstance(result, RefusedLayout):
            refused.append(result)
        else:
            valid.append(result)
    valid.sort(key=lambda found: _sort_key(found, by))
    played = [
        estimate_layout(shape, ranked.layout, ranked.recipe, cluster, tokens=tokens, guard=guard)
        for ranked in valid[:PLAYED]
    ]
    return merge_rankings([Ranking(tuple(played), tuple(refused)), Ranking(tuple(valid[PLAYED:]), ())], by, keep=PLAYED)


def merge_rankings(rankings: Sequence[Ranking], by: By, keep: int | None = None) -> Ranking:
    """Return several rankings as one.

    Args:
        rankings: Rankings, each with the best layout at index 0.
        by: Measure by which layouts are ranked.
        keep: Number of entries that come before the others whatever these promise; None puts all in one order.
    """
    valid = [estimated for ranking in rankings for estimated in ranking.valid]
    first = len(valid) if keep is None else keep
    head = order_estimates(valid[:first], by)
    return Ranking((*head, *valid[first:]), tuple(refused for ranking in rankings for refused in ranking.refused))


def order_estimates(estimates: Iterable[Estimate], by: By) -> list[Estimate]:
    """Put the best first; among layouts that are equal within `ERROR`, the most common one.

    A layout of more axes that promises 2 % more is no better choice: the estimate may be off by as much.
    """
    remaining = sorted(estimates, key=lambda estimate: _sort_key(estimate, by))
    order: list[Estimate] = []
    while remaining:
        bound = _cost_per_token(remaining[0], by) * (1 + ERROR)
        equals = [estimate for estimate in remaining if _cost_per_token(estimate, by) <= bound]
        order += sorted(equals, key=lambda estimate: _rarity_key(estimate.layout))
        remaining = remaining[len(equals) :]
    return order


def _cost_per_token(estimate: Estimate, by: By) -> float:
    return (estimate.layout.num_ranks if by == "cost" else 1) / estimate.tokens_per_s


def _rarity_key(layout: Layout) -> tuple[int, ...]:
    """Return a key by which common layouts come first: copies, then sharded copies, then ever more axes."""
    axes = (layout.islands > 1, layout.cp > 1, layout.pp > 1, layout.tp > 1, layout.replicas > 1)
    # of sharding whole copies, then FSDP, are what people run; a pipeline's plain schedule before the clever ones
    return (sum(axes), *map(int, axes), _ZERO.index(layout.zero), layout.schedule != "1f1b", layout.tp * layout.pp)


def _sort_key(estimate: Estimate, by: By) -> tuple[float, float, str]:
    # of equally good ones the one that leaves most memory free; dollars are proportional to device-seconds
    return (_cost_per_token(estimate, by), estimate.memory.total_bytes, str(estimate.layout))


def _best_recipe(
    shape: ModelShape,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    tokens: float | None,
    guard: Verification | None,
) -> Estimate | RefusedLayout:
    if layout.tp > cluster.per_node:
        # never the fastest, and there are very many of them
        return RefusedLayout(
            layout, f"tp={layout.tp} exchanges in every block across nodes of {cluster.per_node}; lower tp"
        )
    apart = describe_island_mismatch(layout, recipe.outer)
    if apart is not None:
        return RefusedLayout(layout, apart)
    limit = usable_bytes(cluster)
    best: Estimate | None = None
    reason: str | None = None
    smallest: RankMemory | None = None
    for variants in _recipe_variants(layout, recipe, shape):
        why = describe_refusal(layout, shape, variants[0])
        if why is not None:
            reason = reason or why
            continue
        for variant in variants:
            memory = worst_rank(shape, layout, effective_recipe(variant, cluster))
            if memory.total_bytes <= limit:
                estimated = estimate_layout(shape, layout, variant, cluster, tokens=tokens, guard=guard, exact=False)
                best = estimated if best is None or estimated.tokens_per_s > best.tokens_per_s else best
                break
            smallest = memory if smallest is None or memory.total_bytes < smallest.total_bytes else smallest
    if best is not None:
        return best
    if smallest is not None and (too_large := describe_excess(smallest, limit)) is not None:
        return RefusedLayout(layout, too_large, smallest.total_bytes / limit)
    return RefusedLayout(layout, reason or "no number of microbatches divides the batch")


def _recipe_variants(layout: Layout, recipe: Recipe, shape: ModelShape) -> Iterator[tuple[Recipe, ...]]:
    """Yield recipes for each number of microbatches, the ones with the most stored tensors first: they are fastest."""
    share = recipe.sequences // layout.dp if recipe.sequences % layout.dp == 0 else 0
    is_divisible = recipe.sequence_length % (layout.cp * layout.tp) == 0
    parallel = replace(recipe, sequence_parallel=layout.tp > 1 and is_divisible and not shape.experts)
    # a split backward pass goes twice through a block, as torch allows where all or nothing is computed again
    is_split = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
    kinds = [kind for kind in _CHECKPOINTING if kind != "selective" or not is_split]
    for number in sorted(set(_microbatch_choices(share)) or {recipe.microbatches}):
        yield tuple(replace(parallel, microbatches=number, checkpointing=kind) for kind in kinds)


def _microbatch_choices(share: int) -> Iterable[int]:
    """Divisors of a rank's sequences: all of a few, else microbatches of 1, 2, 4, ... sequences."""
    sizes = range(1, share + 1) if share <= 16 else [2**power for power in range(share.bit_length())]
    return (share // size for size in sizes if share % size == 0)


def _rank_mixed(shape: ModelShape, recipe: Recipe, cluster: Cluster, tokens: float | None) -> Ranking:
    if recipe.adapter is not None or recipe.outer is not None:
        feature = "model.adapter" if recipe.adapter is not None else "parallel.outer"
        raise ConfigError(
            f"plan: found {feature} and pools of different devices, which are planned for training all weights "
            "in one island; remove it, or plan one pool at a time"
        )
    valid: list[Estimate] = []
    refused: list[RefusedLayout] = []
    for layout in mixed_layouts(cluster):
        reason = "no microbatches fit"
        options: list[Estimate] = []
        for variants in _recipe_variants(layout, recipe, shape):
            why = describe_refusal(layout, shape, variants[0])
            if why is not None:
                reason = why if reason != TOO_LARGE else reason
                continue
            placements = ((variant, place_pipeline(shape, layout, variant, cluster)) for variant in variants)
            chosen = next(((variant, placed) for variant, placed in placements if placed is not None), None)
            if chosen is None:
                reason = TOO_LARGE
                continue
            options.append(estimate_mixed(shape, layout, chosen[0], cluster, chosen[1], tokens))
        if options:
            valid.append(max(options, key=lambda found: found.tokens_per_s))
        else:
            refused.append(RefusedLayout(layout, reason))
    return Ranking(tuple(order_estimates(valid, "speed")), tuple(refused))
