"""Seconds of one step, by what they go to."""

from dataclasses import dataclass, fields

from phalanx.planner.activations import boundary_bytes, microbatch_tokens
from phalanx.planner.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, send
from phalanx.planner.compute import backward_factor, forward_flops
from phalanx.planner.guarding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.links import Link
from phalanx.planner.memory import rank_parameters, stage_layers
from phalanx.planner.recipe import Recipe
from phalanx.planner.schedule import StageTimes, Timeline, bubble_formula, simulate
from phalanx.planner.shape import ModelShape

MOST_SIMULATED = 8
"""Microbatches that are played through, for each pipeline rank; the rest repeats the slowest stage's pace."""


@dataclass(frozen=True)
class Machine:
    """What a step runs on.

    Attributes:
        flops_per_s: Operations that one rank really does in a second: its peak times what products reach of it.
        memory_bytes_per_s: Of a rank's memory; None where it is not known: the optimizer then takes no time.
        per_node: Ranks that the inner link joins.
        inside: That link.
        between: Link between nodes.
        host_bytes_per_s: Between a rank and its host's memory; None where it is not known.
        microbatch_s: Seconds that a microbatch costs in each stage beside its computation.
    """

    flops_per_s: float
    memory_bytes_per_s: float | None
    per_node: int
    inside: Link
    between: Link
    host_bytes_per_s: float | None = None
    microbatch_s: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank; all but `hidden` add up to the whole.

    Attributes:
        compute: Forward and backward of the slowest stage.
        tensor: Exchange between tensor parallel ranks, in the way of the computation.
        context: The same between context parallel ranks.
        bubble: Waiting in the pipeline, for other stages and for what they send.
        data: Exchange of gradients and parameters that no computation hides.
        optimizer: Its update.
        offload: Traffic to the host's memory.
        verification: Audits that do not fit into the bubble.
        hidden: Exchange that goes on beside the computation.
    """

    compute: float
    tensor: float
    context: float
    bubble: float
    data: float
    optimizer: float
    offload: float
    verification: float
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the parts that add up to the total, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "hidden"}


def step_time(
    shape: ModelShape,
    layout: Layout,
    recipe: Recipe,
    machine: Machine,
    guard: Verification | None = None,
    *,
    exact: bool = True,
) -> StepTime:
    """Estimate one step.

    Args:
        shape: The model.
        layout: A valid one.
        recipe: How it is trained.
        machine: What it runs on.
        guard: What is verified; None verifies nothing.
        exact: Play the pipeline through; else take the formula for equal stages, which is much quicker.
    """
    times, per_block = stage_times(shape, layout, recipe, machine)
    busy = max(
        sum(time.forward + time.inputs + time.weights for time in times[rank :: layout.pp]) for rank in range(layout.pp)
    )
    busy *= recipe.microbatches
    whole = _pipeline(shape, layout, recipe, machine, times) if exact else _quick(shape, layout, recipe, machine, busy)
    layers = max(sum(_layers(shape, layout, recipe)[rank :: layout.pp]) for rank in range(layout.pp))
    tensor = per_block.tensor * layers * recipe.microbatches
    context = per_block.context * layers * recipe.microbatches
    # without a pipeline both are the same but for rounding
    bubble = max(0.0, whole - busy)
    data, hidden = _data(shape, layout, recipe, machine, busy - tensor - context)
    verification = guard.extra_time(bubble / whole) * whole if guard is not None else 0.0
    return StepTime(
        compute=busy - tensor - context,
        tensor=tensor,
        context=context,
        bubble=bubble,
        data=data,
        optimizer=_update(shape, layout, recipe, machine),
        offload=_offload(shape, layout, recipe, machine),
        verification=verification,
        hidden=hidden,
    )


def timeline(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, most: int = 16) -> Timeline:
    """Play the first microbatches of a step through, for a picture."""
    times, _ = stage_times(shape, layout, recipe, machine)
    shown = max(layout.pp, min(recipe.microbatches, most) // layout.pp * layout.pp)
    link = link_of_axis(layout, "pp", machine)
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    return simulate(layout.schedule, layout.pp, min(shown, recipe.microbatches), times, link.latency_s, transfer)


@dataclass(frozen=True)
class Exchanges:
    """Seconds of the exchanges of one block and microbatch, forward and backward."""

    tensor: float
    context: float


def stage_times(
    shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine
) -> tuple[list[StageTimes], Exchanges]:
    """Return what one microbatch takes in each stage, exchanges inside a block included, and these exchanges."""
    tokens = microbatch_tokens(layout, recipe)
    flops = forward_flops(shape, recipe.sequence_length)
    speed = machine.flops_per_s * layout.tp
    block = tokens * (flops.block + flops.scores) / speed
    head = tokens * flops.head / speed
    again = backward_factor(recipe.checkpointing) - 2.0
    exchanges = _exchanges(shape, layout, recipe, machine)
    half = (exchanges.tensor + exchanges.context) / 2
    fixed = machine.microbatch_s / 2
    counts = _layers(shape, layout, recipe)
    times = []
    for stage, layers in enumerate(counts):
        last = head if stage == len(counts) - 1 else 0.0
        times.append(
            StageTimes(
                forward=layers * (block + half) + last + fixed,
                inputs=layers * (block * (1 + again) + half) + last + fixed,
                weights=layers * block + last,
            )
        )
    return times, exchanges


def link_of_axis(layout: Layout, axis: str, machine: Machine) -> Link:
    """Return the slowest link that a group along an axis crosses; ranks count up along tp, cp, dp and then pp."""
    stride = 1
    for name in ("tp", "cp", "dp", "pp"):
        size = getattr(layout, name)
        if name == axis:
            return machine.inside if stride * size <= machine.per_node else machine.between
        stride *= size
    raise ValueError(f"axis: found {axis!r}; expected tp, cp, dp or pp")


def _layers(shape: ModelShape, layout: Layout, recipe: Recipe) -> tuple[int, ...]:
    return stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)


def _exchanges(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> Exchanges:
    """Four all-reduces of the stream for tensor parallel, eight all-to-alls of queries, keys, values and outputs.

    Source: Shoeybi et al. 2019, section 3; Jacobs et al. 2023 (Ulysses), section 3.2.
    """
    tokens = microbatch_tokens(layout, recipe)
    tensor = context = 0.0
    if layout.tp > 1:
        size = tokens * shape.hidden * recipe.inner_bytes
        tensor = 4 * all_reduce(size, layout.tp, link_of_axis(layout, "tp", machine))
    if layout.cp > 1:
        queries = tokens * shape.heads * shape.head_dim * recipe.inner_bytes / layout.tp
        shared = tokens * shape.kv_heads * shape.head_dim * recipe.inner_bytes / layout.tp
        link = link_of_axis(layout, "cp", machine)
        context = 4 * (all_to_all(queries, layout.cp, link) + all_to_all(shared, layout.cp, link))
    return Exchanges(tensor, context)


def _pipeline(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, times: list[StageTimes]) -> float:
    link = link_of_axis(layout, "pp", machine)
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s if layout.pp > 1 else 0.0
    played = min(recipe.microbatches, MOST_SIMULATED * layout.pp)
    if layout.schedule == "interleaved":
        played -= played % layout.pp
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    length = simulate(schedule, layout.pp, played, times, link.latency_s, transfer).length_s
    pace = max(
        sum(time.forward + time.inputs + time.weights for time in times[rank :: layout.pp]) for rank in range(layout.pp)
    )
    return length + (recipe.microbatches - played) * max(pace, layout.stages_per_rank * transfer)


def _quick(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, busy: float) -> float:
    if layout.pp == 1:
        return busy
    bubble = bubble_formula(layout.pp, recipe.microbatches, layout.stages_per_rank)
    # zero-bubble H1 waits a third of what 1F1B does where forward and both backwards take equally long
    bubble = bubble / (3 - 2 * bubble) if layout.schedule == "zero-bubble" else bubble
    link = link_of_axis(layout, "pp", machine)
    size = boundary_bytes(shape, layout, recipe)
    # a link that is slower than the stages sets the pace
    whole = max(busy / (1 - bubble), recipe.microbatches * layout.stages_per_rank * size / link.bytes_per_s)
    return whole + 2 * (layout.pp - 1) * send(size, link)


def _data(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, compute: float) -> tuple[float, float]:
    """Return the exchange of gradients and parameters that shows, and that which is hidden."""
    if layout.shards == 1:
        return 0.0, 0.0
    link = link_of_axis(layout, "dp" if layout.dp > 1 else "cp", machine)
    size = _most_parameters(shape, layout, recipe) * recipe.weight_bytes
    gathered = _most_parameters(shape, layout, recipe) * recipe.inner_bytes
    shards, microbatches = layout.shards, recipe.microbatches
    backward = compute * 2 / 3
    if layout.zero < 2:
        # summed once, in buckets beside the last microbatch's backward pass; the last bucket shows
        whole = all_reduce(size, shards, link)
        first = whole / max(1, shape.layers // layout.pp)
        return _shown(whole - first, backward / microbatches, first)
    scatter, gather = reduce_scatter(size, shards, link), all_gather(gathered, shards, link)
    # gathered once for the first forward pass, or for both passes of every microbatch
    whole = microbatches * scatter + gather * (1 if layout.zero == 2 else 2 * microbatches)
    # nothing is at work yet while the first block is gathered, and nothing any more while the last one is summed
    ends = (scatter + gather) / max(1, shape.layers // layout.pp)
    return _shown(whole - ends, compute, ends)


def _shown(exchange: float, beside: float, always: float) -> tuple[float, float]:
    hidden = min(exchange, beside)
    return exchange - hidden + always, hidden


def _update(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds to read and write weights, gradients and state once; bound by memory, not by arithmetic."""
    if machine.memory_bytes_per_s is None or recipe.offload != "none":
        return 0.0
    number = _most_parameters(shape, layout, recipe) / (layout.shards if layout.zero else 1)
    moved = number * (2 * (recipe.weight_bytes + recipe.state_bytes) + recipe.weight_bytes)
    return moved / machine.memory_bytes_per_s


def _offload(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds to bring gradients to the host and parameters back, and with ``all`` parameters for both passes."""
    if recipe.offload == "none" or machine.host_bytes_per_s is None:
        return 0.0
    number = _most_parameters(shape, layout, recipe) / (layout.shards if layout.zero else 1)
    trips = 2 if recipe.offload == "optimizer" else 1 + 2 * recipe.microbatches
    return trips * number * recipe.weight_bytes / machine.host_bytes_per_s


def _most_parameters(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    counts = _layers(shape, layout, recipe)
    return max(rank_parameters(shape, layout, sum(counts[rank :: layout.pp]), rank) for rank in range(layout.pp))
