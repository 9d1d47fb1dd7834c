"""The exchanges between the ranks of a layout in a step, and how long they take."""

from dataclasses import dataclass

from phalanx.planner.cluster.links import Link, all_gather, all_reduce, all_to_all, reduce_scatter, send_seconds
from phalanx.planner.cluster.machine import Exchange, Machine
from phalanx.planner.cost.diloco_cost import outer_numbers, sent_bytes
from phalanx.planner.cost.memory import ParameterCounts, held_parameters, rank_parameters, stage_layers
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import microbatch_tokens
from phalanx.planner.model.adapter import adapted_linears
from phalanx.planner.model.compute import forward_flops
from phalanx.planner.model.recipe import EXACT_BYTES, Recipe
from phalanx.planner.model.shape import ModelShape

SHARED_GRADIENTS = 2
"""Lowest ZeRO level at which gradients are shared."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of the rank that sends most, by the fewest that any collective can do with.

    Attributes:
        copies: Bytes of gradients and parameters, among ranks that share or would hold equal copies.
        groups: Gradients, between groups that are replicas of each other.
        islands: Bytes moved between islands, per step on average.
    """

    copies: float
    groups: float
    islands: float


def count_traffic(shape: ModelShape, layout: Layout, recipe: Recipe) -> Traffic:
    """Count the bytes that a rank sends; tensor, context and pipeline parallel ranks are not included."""
    parameters = max_held_parameters(shape, layout, recipe)
    gradients, others = parameters.trained * recipe.weight_bytes, (layout.num_shards - 1) / layout.num_shards
    if layout.zero < SHARED_GRADIENTS:
        copies = others * gradients * (3 if layout.zero == 1 else 2)
    else:
        scatters, gathers = num_calls(layout, recipe)
        gathered = gathers * parameters.stored
        if layout.zero > SHARED_GRADIENTS and layout.pp == 1:
            # what is outside blocks stays whole from its forward to its backward pass
            gathered -= recipe.microbatches * rank_parameters(shape, layout, 0, 0)
        copies = others * (scatters * gradients + gathered * recipe.inner_bytes)
    groups = 2 * (layout.replicas - 1) / layout.replicas * gradients / layout.num_shards
    islands = 0.0
    if recipe.outer is not None and layout.islands > 1:
        numbers = outer_numbers(parameters.trained, layout)
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


def max_held_parameters(shape: ModelShape, layout: Layout, recipe: Recipe) -> ParameterCounts:
    """Parameters of the pipeline rank that has most, before ZeRO shares them."""
    counts = stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)
    ranks = (held_parameters(shape, layout, recipe, sum(counts[rank :: layout.pp]), rank) for rank in range(layout.pp))
    return max(ranks, key=lambda held: held.stored)


@dataclass(frozen=True)
class Exchanges:
    """Seconds of the exchanges of one block and microbatch, forward and backward.

    Attributes:
        tensor: Seconds between tensor parallel ranks.
        context: Between context parallel ranks, as far as it shows.
        hidden: Between context parallel ranks, beside the computation.
    """

    tensor: float
    context: float
    hidden: float = 0.0


def link_of_axis(layout: Layout, axis: str, machine: Machine, exchange: Exchange | None = None) -> Link:
    """Return the slowest link that a group along an axis crosses; ranks count up as in `Layout.axis_sizes`.

    Args:
        exchange: Exchange that stops the computation; None for an exchange beside it.
    """
    stride = 1
    for name, size in layout.axis_sizes().items():
        if name == axis:
            if axis == "island" and machine.island_link is not None:
                return machine.island_link
            if stride * size > machine.per_node:
                return machine.between
            return machine.inside if exchange is None else machine.exchanges.get(exchange, machine.inside)
        stride *= size
    raise ValueError(f"axis: found {axis!r}; expected one of {', '.join(layout.axis_sizes())}")


def block_exchanges(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> Exchanges:
    """Four sums of the stream for tensor parallel, eight all-to-alls of queries, keys, values and outputs.

    With sequence parallel each sum is a reduce-scatter and an all-gather; in a ring keys and values go round instead.

    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2; Jacobs et al. 2023 (Ulysses),
    section 3.2.
    """
    tokens = microbatch_tokens(layout, recipe)
    tensor = context = hidden = 0.0
    if layout.tp > 1:
        tensor = 4 * _stream_seconds(tokens * shape.hidden * recipe.inner_bytes, layout, recipe, machine)
    if layout.cp > 1 and layout.context == "ring":
        context, hidden = _ring_exchange(shape, layout, recipe, machine)
    elif layout.cp > 1:
        queries = tokens * shape.heads * shape.head_dim * recipe.inner_bytes / layout.tp
        shared = tokens * shape.kv_heads * shape.head_dim * recipe.inner_bytes / layout.tp
        link = link_of_axis(layout, "cp", machine, "swap")
        context = 4 * (all_to_all(queries, layout.cp, link) + all_to_all(shared, layout.cp, link))
    return Exchanges(tensor, context, hidden)


def vocabulary_exchange(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds of the exchanges around a vocabulary that tensor parallel ranks share, for one microbatch.

    The rows of the embedding, the gradient of the head's input, and for each token the largest logit and two sums.
    With sequence parallel the former two are cut and joined on the other way.
    """
    if layout.tp == 1 or shape.vocab % layout.tp:
        return 0.0
    tokens, link = microbatch_tokens(layout, recipe), link_of_axis(layout, "tp", machine)
    size = tokens * shape.hidden * recipe.inner_bytes
    small = all_reduce(4 * tokens, layout.tp, link) + all_reduce(8 * tokens, layout.tp, link)
    embedded = all_reduce(size, layout.tp, link_of_axis(layout, "tp", machine, "sum"))
    if recipe.sequence_parallel:
        embedded += all_gather(size, layout.tp, link_of_axis(layout, "tp", machine, "slices"))
    return embedded + _stream_seconds(size, layout, recipe, machine) + small


def data_exchange(
    shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, compute: float
) -> tuple[float, float]:
    """Return the exchange of gradients and parameters that shows, and that which is hidden."""
    settled = _settling_seconds(shape, layout, recipe, machine)
    if layout.num_shards == 1:
        return settled, 0.0
    link = link_of_axis(layout, "dp" if layout.dp > 1 else "cp", machine)
    parameters = max_held_parameters(shape, layout, recipe)
    size = parameters.trained * recipe.weight_bytes
    shards, microbatches = layout.num_shards, recipe.microbatches
    # beside frozen weights the way back takes as long as the way ahead
    backward = compute * (2 / 3 if recipe.adapter is None else 1 / 2) if machine.overlap else 0.0
    if layout.zero < SHARED_GRADIENTS:
        # summed once, in buckets beside the last microbatch's backward pass; the last bucket shows
        reduction = all_reduce(size, shards, link)
        first = reduction / max(1, shape.layers // layout.pp)
        # with ZeRO 1 each has updated its part only, and tells the others
        gathering = all_gather(size, shards, link) if layout.zero == 1 else 0.0
        return _split_shown(reduction - first, backward / microbatches, first + gathering + settled)
    groups = max(1, shape.layers // layout.pp)
    calls = groups + layout.stages_per_rank
    # what lies around the blocks has no gradient beside adapters
    sums = calls if recipe.adapter is None else groups
    scatter = _of_blocks("gradients", size, sums, layout, machine)
    gather = _of_blocks("parameters", parameters.stored * recipe.inner_bytes, calls, layout, machine)
    scatters, gathers = num_calls(layout, recipe)
    reduction = scatters * scatter + gathers * gather
    if layout.zero == 3 and layout.pp == 1:
        # what is outside blocks stays whole from its forward to its backward pass
        outside = rank_parameters(shape, layout, 0, 0) * recipe.inner_bytes
        reduction -= microbatches * _of_blocks("parameters", outside, 1, layout, machine)
    # nothing is at work yet while the first block is gathered, and nothing any more while the last one is summed
    ends = (scatter + gather) / groups
    bookkeeping = scatters * (groups + 1) * machine.shared_block_s
    shown, hidden = _split_shown(reduction - ends, compute if machine.overlap else 0.0, ends + bookkeeping + settled)
    late, beside = _between_groups(size / shards, sums, layout, machine, backward / microbatches)
    return shown + late, hidden + beside


def _between_groups(size: float, calls: int, layout: Layout, machine: Machine, backward: float) -> tuple[float, float]:
    """Return the seconds of summing gradients over groups that are replicas of each other: visible and hidden.

    Each rank has its part of the sum over its own group, and they are summed once a step, call by call beside the last
    backward pass; the last call shows.
    """
    if layout.replicas == 1:
        return 0.0, 0.0
    link = link_of_axis(layout, "replica", machine)
    total = all_reduce(size, layout.replicas, link) + 2 * (calls - 1) * (layout.replicas - 1) * link.latency_s
    return _split_shown(total - total / calls, backward, total / calls)


def _stream_seconds(size: float, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds to sum the residual stream, or to scatter its sum and to join it again."""
    if not recipe.sequence_parallel:
        return all_reduce(size, layout.tp, link_of_axis(layout, "tp", machine, "sum"))
    link = link_of_axis(layout, "tp", machine, "slices")
    return all_gather(size, layout.tp, link) + reduce_scatter(size, layout.tp, link)


def _ring_exchange(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> tuple[float, float]:
    """Return the exchange of a ring that shows in one block and microbatch, and that which is hidden.

    Keys and values are sent on cp - 1 times in each pass, beside a round of attention; their gradients, in fp32, cp
    times, of which the last one has nothing beside it. Backward a round takes twice as long.

    Source: Liu et al. 2023, section 3.
    """
    tokens, rounds = microbatch_tokens(layout, recipe), layout.cp - 1
    link = link_of_axis(layout, "cp", machine)
    numbers = 2 * tokens * shape.kv_heads * shape.head_dim / layout.tp
    shared, back = send_seconds(numbers * recipe.inner_bytes, link), send_seconds(numbers * EXACT_BYTES, link)
    scores = tokens * forward_flops(shape, recipe.sequence_length).scores / (machine.flops_per_s * layout.tp)
    beside = scores / layout.cp if machine.overlap else 0.0
    ahead, behind = _split_shown(shared, beside, 0.0), _split_shown(shared + back, 2 * beside, 0.0)
    return rounds * (ahead[0] + behind[0]) + back, rounds * (ahead[1] + behind[1])


def _settling_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds to complete gradients of which ranks have parts, once a step.

    Counts a tied table, which is at both ends of a pipeline; and with sequence parallel each norm and bias that every
    tensor parallel rank has, one by one. Beside frozen weights it counts the first matrices of adapters.
    """
    seconds = 0.0
    if recipe.adapter is not None:
        link, shares = link_of_axis(layout, "tp", machine), layout.num_shards if layout.zero >= SHARED_GRADIENTS else 1
        sizes = [
            linear.inputs * recipe.adapter.rank * recipe.weight_bytes
            for linear in adapted_linears(shape, recipe.adapter)
        ]
        return -(-shape.layers // layout.pp) * sum(all_reduce(size / shares, layout.tp, link) for size in sizes)
    if layout.pp > 1 and shape.tied:
        table = shape.head_matrix * recipe.weight_bytes / layout.tp / (layout.num_shards if layout.zero >= 2 else 1)
        seconds += all_reduce(table, 2, link_of_axis(layout, "pp", machine))
    if layout.tp > 1 and recipe.sequence_parallel:
        vectors = shape.layer_whole // shape.hidden * -(-shape.layers // layout.pp)
        seconds_per_vector = all_reduce(
            shape.hidden * recipe.weight_bytes, layout.tp, link_of_axis(layout, "tp", machine)
        )
        seconds += vectors * seconds_per_vector
    return seconds


def _of_blocks(kind: Exchange, size: float, calls: int, layout: Layout, machine: Machine) -> float:
    """Seconds to gather parameters, or to sum gradients and share them, block by block in so many calls."""
    axis, shards = "dp" if layout.dp > 1 else "cp", layout.num_shards
    link = link_of_axis(layout, axis, machine, kind)
    if kind in machine.exchanges and link is machine.exchanges[kind]:
        # what was measured holds a block's copies too
        return all_gather(size, shards, link) + (calls - 1) * (shards - 1) * link.latency_s
    moved = reduce_scatter(size, shards, link) if kind == "gradients" else all_gather(size, shards, link)
    return moved + (0.0 if machine.memory_bytes_per_s is None else 2 * size / machine.memory_bytes_per_s)


def _split_shown(exchange: float, beside: float, always: float) -> tuple[float, float]:
    hidden = min(exchange, beside)
    return exchange - hidden + always, hidden
