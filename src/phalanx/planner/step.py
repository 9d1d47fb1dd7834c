"""Seconds of one step, by what they go to."""

from dataclasses import dataclass, fields

from phalanx.planner.activations import boundary_bytes, microbatch_tokens
from phalanx.planner.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, send
from phalanx.planner.compute import backward_factor, forward_flops
from phalanx.planner.guarding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.links import Link
from phalanx.planner.memory import rank_parameters, stage_layers
from phalanx.planner.orders import orders
from phalanx.planner.recipe import Recipe
from phalanx.planner.schedule import StageTimes, Timeline, bubble_formula, simulate
from phalanx.planner.shape import ModelShape
from phalanx.planner.shared_cores import play_sharing

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
        head_flops_per_s: The same as `flops_per_s` for the head and the loss; None where they are alike.
        block_s: Seconds that a microbatch costs in each block, forward and backward, whatever its size.
        shared_block_s: Seconds that sharing a block costs each microbatch with ZeRO 2 and 3, whatever its size.
        overlap: Exchanges go on beside computation.
        cores: That the ranks of a node share; None where each has a device of its own.
    """

    flops_per_s: float
    memory_bytes_per_s: float | None
    per_node: int
    inside: Link
    between: Link
    host_bytes_per_s: float | None = None
    microbatch_s: float = 0.0
    head_flops_per_s: float | None = None
    block_s: float = 0.0
    shared_block_s: float = 0.0
    overlap: bool = True
    cores: int | None = None

    def crowd(self, ranks: int) -> float:
        """How many times longer work takes while so many ranks of all nodes do it at once."""
        if self.cores is None:
            return 1.0
        return max(1.0, min(ranks, self.per_node) / self.cores)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank; all but `hidden` add up to the whole.

    Attributes:
        compute: Forward and backward of the slowest stage.
        tensor: Exchange between tensor parallel ranks, in the way of the computation.
        context: The same between context parallel ranks.
        bubble: Waiting in the pipeline, for other stages, for what they send, and for a core.
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
    crowd = machine.crowd(layout.world)
    if layout.pp == 1:
        busy *= crowd
        per_block = Exchanges(per_block.tensor * crowd, per_block.context * crowd)
    whole = busy
    if layout.pp > 1 and exact:
        whole = _pipeline(shape, layout, recipe, machine, times)
    elif layout.pp > 1:
        whole = _quick(shape, layout, recipe, machine, busy)
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
        data=data * crowd,
        optimizer=_update(shape, layout, recipe, machine) * crowd,
        offload=_offload(shape, layout, recipe, machine),
        verification=verification,
        hidden=hidden,
    )


def timeline(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, most: int = 16) -> Timeline:
    """Play the first microbatches of a step through, for a picture."""
    times, _ = stage_times(shape, layout, recipe, machine)
    shown = min(recipe.microbatches, max(layout.pp, min(recipe.microbatches, most) // layout.pp * layout.pp))
    link = link_of_axis(layout, "pp", machine)
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    crowd = machine.crowd(layout.world)
    if crowd > 1:
        every = orders(layout.schedule, layout.pp, shown, layout.stages_per_rank)
        return play_sharing(every, times, layout.pp / crowd, link.latency_s + transfer)
    return simulate(layout.schedule, layout.pp, shown, times, link.latency_s, transfer)


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
    block = tokens * (flops.block + flops.scores) / (machine.flops_per_s * layout.tp) + machine.block_s / 3
    head = tokens * flops.head / ((machine.head_flops_per_s or machine.flops_per_s) * layout.tp)
    again = backward_factor(recipe.checkpointing) - 2.0
    exchanges = _exchanges(shape, layout, recipe, machine)
    half = (exchanges.tensor + exchanges.context) / 2
    fixed = machine.microbatch_s / 2
    around = _around(shape, layout, recipe, machine)
    counts = _layers(shape, layout, recipe)
    times = []
    for stage, layers in enumerate(counts):
        last = head + around / 3 if stage == len(counts) - 1 else 0.0
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


def _around(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds of the exchanges around a vocabulary that tensor parallel ranks share, for one microbatch.

    The rows of the embedding, the gradient of the head's input, and for each token the largest logit and two sums.
    """
    if layout.tp == 1 or shape.vocab % layout.tp:
        return 0.0
    tokens, link = microbatch_tokens(layout, recipe), link_of_axis(layout, "tp", machine)
    stream = all_reduce(tokens * shape.hidden * recipe.inner_bytes, layout.tp, link)
    return 2 * stream + all_reduce(4 * tokens, layout.tp, link) + all_reduce(8 * tokens, layout.tp, link)


def _pipeline(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, times: list[StageTimes]) -> float:
    link = link_of_axis(layout, "pp", machine)
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    played = min(recipe.microbatches, MOST_SIMULATED * layout.pp)
    if layout.schedule == "interleaved":
        played -= played % layout.pp
    # every place of the pipeline is taken by as many ranks as share it
    lanes = layout.pp / machine.crowd(layout.world)
    length = simulate(layout.schedule, layout.pp, played, times, link.latency_s, transfer).length_s
    if lanes < layout.pp:
        every = orders(layout.schedule, layout.pp, played, layout.stages_per_rank)
        length = play_sharing(every, times, lanes, link.latency_s + transfer).length_s
    pace = max(
        sum(time.forward + time.inputs + time.weights for time in times[rank :: layout.pp]) for rank in range(layout.pp)
    )
    pace = max(pace, layout.stages_per_rank * transfer, _work(times) / lanes)
    return length + (recipe.microbatches - played) * pace


def _work(times: list[StageTimes]) -> float:
    """Seconds of one microbatch in all stages together."""
    return sum(time.forward + time.inputs + time.weights for time in times)


def _quick(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, busy: float) -> float:
    bubble = bubble_formula(layout.pp, recipe.microbatches, layout.stages_per_rank)
    # zero-bubble H1 waits a third of what 1F1B does where forward and both backwards take equally long
    bubble = bubble / (3 - 2 * bubble) if layout.schedule == "zero-bubble" else bubble
    link = link_of_axis(layout, "pp", machine)
    size = boundary_bytes(shape, layout, recipe)
    # a link that is slower than the stages sets the pace
    whole = max(busy / (1 - bubble), recipe.microbatches * layout.stages_per_rank * size / link.bytes_per_s)
    if machine.cores is not None:
        times, _ = stage_times(shape, layout, recipe, machine)
        whole = max(whole, recipe.microbatches * _work(times) * machine.crowd(layout.world) / layout.pp)
    return whole + 2 * (layout.pp - 1) * send(size, link)


def _data(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, compute: float) -> tuple[float, float]:
    """Return the exchange of gradients and parameters that shows, and that which is hidden."""
    if layout.shards == 1:
        return 0.0, 0.0
    link = link_of_axis(layout, "dp" if layout.dp > 1 else "cp", machine)
    size = _most_parameters(shape, layout, recipe) * recipe.weight_bytes
    gathered = _most_parameters(shape, layout, recipe) * recipe.inner_bytes
    shards, microbatches = layout.shards, recipe.microbatches
    backward = compute * 2 / 3 if machine.overlap else 0.0
    if layout.zero < 2:
        # summed once, in buckets beside the last microbatch's backward pass; the last bucket shows
        whole = all_reduce(size, shards, link)
        first = whole / max(1, shape.layers // layout.pp)
        # with ZeRO 1 each has updated its part only, and tells the others
        told = all_gather(size, shards, link) if layout.zero == 1 else 0.0
        return _shown(whole - first, backward / microbatches, first + told)
    scatter = reduce_scatter(size, shards, link) + _copied(size, machine)
    gather = all_gather(gathered, shards, link) + _copied(gathered, machine)
    # gathered once for the first forward pass, or for both passes of every microbatch
    whole = microbatches * scatter + gather * (1 if layout.zero == 2 else 2 * microbatches)
    # nothing is at work yet while the first block is gathered, and nothing any more while the last one is summed
    groups = max(1, shape.layers // layout.pp)
    ends = (scatter + gather) / groups
    calls = microbatches * (groups + 1) * machine.shared_block_s
    return _shown(whole - ends, compute if machine.overlap else 0.0, ends + calls)


def _copied(size: float, machine: Machine) -> float:
    """Seconds to copy parameters, or gradients, between one buffer for the exchange and their own places."""
    return 0.0 if machine.memory_bytes_per_s is None else 2 * size / machine.memory_bytes_per_s


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
