"""Seconds of one step, by their cause; where ranks outnumber cores, those at work get equal shares of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from phalanx.planner.cluster.links import send_seconds
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.cost.diloco_cost import moved_bytes, num_tensors, outer_numbers, outer_seconds
from phalanx.planner.cost.exchanging import (
    Exchanges,
    block_exchanges,
    data_exchange,
    link_of_axis,
    max_held_parameters,
    vocabulary_exchange,
)
from phalanx.planner.cost.memory import stage_layers
from phalanx.planner.cost.schedule import Slot, StageTimes, Timeline, bubble_formula, simulate_step
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import boundary_bytes, microbatch_tokens
from phalanx.planner.model.compute import adapter_flops, backward_factor, forward_flops
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES, Kind, Order, Work, rank_orders


def play_sharing(every: Sequence[Order], times: Sequence[StageTimes], cores: float, latency_s: float = 0.0) -> Timeline:
    """Play the orders of all ranks through; a rank that waits for another one leaves its core to those at work.

    Args:
        times: Seconds of each stage's work on a core of its own.
        cores: Number of ranks that go at full speed at once; more than that each get an equal share.
        latency_s: Seconds from the end of a piece of work until the next stage has its result, whatever the cores do.
    """
    waiting = [list(order) for order in every]
    began: list[float] = [0.0] * len(every)
    remaining: list[float | None] = [None] * len(every)
    ended: dict[Work, float] = {}
    slots: list[Slot] = []
    now = 0.0
    while any(waiting):
        starts: list[float] = []
        for rank, order in enumerate(waiting):
            ready = _inputs_ready(order[0], ended, len(times), latency_s) if order and remaining[rank] is None else None
            if ready is not None and ready <= now:
                began[rank], remaining[rank] = now, times[order[0].stage].seconds_of(order[0].kind)
            elif ready is not None:
                starts.append(ready)
        at_work = [seconds for seconds in remaining if seconds is not None]
        if not at_work and not starts:
            raise ValueError(f"schedule: {sum(map(len, waiting))} pieces of work wait for each other")
        speed = min(1.0, cores / len(at_work)) if at_work else 1.0
        ends = [now + seconds / speed for seconds in at_work]
        then = min([*ends, *starts])
        for rank, seconds in enumerate(remaining):
            if seconds is None:
                continue
            remaining[rank] = rest = seconds - (then - now) * speed
            # what is left of a rounding is none
            if rest <= 1e-12 * max(1.0, then):
                work = waiting[rank].pop(0)
                slots.append(Slot(rank, work, began[rank], then))
                ended[work] = then
                remaining[rank] = None
        now = then
    return Timeline(tuple(sorted(slots, key=lambda slot: (slot.rank, slot.start))), len(every))


def _inputs_ready(work: Work, ended: Mapping[Work, float], num_stages: int, latency_s: float) -> float | None:
    """Return the time when all inputs of a piece of work are there; None while one is not computed."""
    needs: list[tuple[tuple[Kind, ...], int]] = []
    if work.kind == "forward":
        needs += [(("forward",), work.stage - 1)] if work.stage else []
    elif work.kind == "weights":
        needs.append((("inputs",), work.stage))
    else:
        needs.append((("forward",), work.stage))
        needs += [(("backward", "inputs"), work.stage + 1)] if work.stage < num_stages - 1 else []
    latest = 0.0
    for kinds, stage in needs:
        ends = [ended[done] for kind in kinds if (done := Work(kind, stage, work.microbatch)) in ended]
        if not ends:
            return None
        latest = max(latest, *ends, ends[0] + (latency_s if stage != work.stage else 0.0))
    return latest


MAX_SIMULATED = 8
"""Microbatches that are played through, for each pipeline rank; the rest repeats the slowest stage's pace."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank; all but `hidden` add up to the whole.

    Attributes:
        compute: Forward and backward of the slowest stage.
        tensor: Exchange between tensor parallel ranks, in the way of the computation.
        context: The same between context parallel ranks.
        bubble: Waiting in the pipeline: for other stages, for messages, and for a core.
        data: Exchange of gradients and parameters that no computation hides.
        offload: Traffic to the host's memory.
        verification: Audits that do not fit into the bubble.
        hidden: Exchange that goes on beside the computation.
        outer: Joining islands: of a step, on average.
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
    outer: float = 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts_by_name().values())

    def parts_by_name(self) -> dict[str, float]:
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
        layout: Layout that `describe_refusal` accepts.
        guard: Verification of workers; None verifies nothing.
        exact: Play the pipeline through; else take the formula for equal stages, which is much quicker.
    """
    alone = _with_a_core_each(shape, layout, recipe, machine, exact=exact)
    crowd = machine.crowding_factor(layout.num_ranks)
    if crowd > 1:
        work = _with_a_core_each(shape, layout, recipe, machine.without_waiting(), exact=exact)
        shared = _shared_length(shape, layout, recipe, machine.without_waiting(), exact=exact)
        alone = _sharing_cores(alone, work, crowd, shared)
    if guard is None:
        return alone
    total = alone.compute + alone.tensor + alone.context + alone.bubble
    return replace(alone, verification=guard.extra_time(alone.bubble / total) * total)


def work_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Return the seconds of a step in which the cores of all ranks together are at work; waiting takes none."""
    busy = machine.without_waiting()
    times, _ = stage_times(shape, layout, recipe, busy)
    step = _with_a_core_each(shape, layout, recipe, busy, exact=False)
    passes = _total_work_seconds(times) * recipe.microbatches * layout.num_ranks / layout.pp
    return passes + (step.data + step.optimizer + step.outer) * layout.num_ranks


def _with_a_core_each(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, *, exact: bool) -> StepTime:
    times, per_block = stage_times(shape, layout, recipe, machine)
    busy = recipe.microbatches * _slowest_rank_seconds(times, layout.pp)
    total = busy
    if layout.pp > 1:
        total = (_played_seconds if exact else _quick_seconds)(shape, layout, recipe, machine, times)
    layers = max(sum(_layers_per_stage(shape, layout, recipe)[rank :: layout.pp]) for rank in range(layout.pp))
    tensor = per_block.tensor * layers * recipe.microbatches
    context = per_block.context * layers * recipe.microbatches
    data, hidden = data_exchange(shape, layout, recipe, machine, busy - tensor - context)
    return StepTime(
        compute=busy - tensor - context,
        tensor=tensor,
        context=context,
        # without a pipeline both are the same but for rounding
        bubble=max(0.0, total - busy),
        data=data,
        optimizer=update_seconds(shape, layout, recipe, machine),
        outer=_outer_step_seconds(shape, layout, recipe, machine),
        offload=_offload_seconds(shape, layout, recipe, machine),
        verification=0.0,
        hidden=hidden + per_block.hidden * layers * recipe.microbatches,
    )


def _sharing_cores(alone: StepTime, work: StepTime, crowd: float, shared: float) -> StepTime:
    """Return what becomes of a step when several ranks share a core, as many as `crowd` says.

    A core is never idle while one of its ranks has work: the step takes as long as one rank needs by itself, or as all
    of them work, whichever is longer.

    Args:
        alone: Times with a core for each rank.
        crowd: Number of ranks that share a core.
        shared: Seconds of the pipeline with its cores shared; 0 without a pipeline.
    """
    alone = replace(alone, outer=max(alone.outer, crowd * work.outer))
    if shared:
        busy = alone.compute + alone.tensor + alone.context
        return replace(
            alone,
            bubble=max(alone.bubble, shared - busy),
            data=max(alone.data, crowd * work.data),
            optimizer=alone.optimizer * crowd,
        )
    computing, exchanging = alone.compute + alone.optimizer, alone.tensor + alone.context + alone.data
    least = work.tensor + work.context + work.data
    stretched = (
        (max(computing + exchanging, crowd * (computing + least)) - crowd * computing) / exchanging
        if exchanging
        else 0.0
    )
    return replace(
        alone,
        compute=alone.compute * crowd,
        tensor=alone.tensor * stretched,
        context=alone.context * stretched,
        data=alone.data * stretched,
        optimizer=alone.optimizer * crowd,
    )


def play_timeline(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, most: int = 16) -> Timeline:
    """Play the first microbatches of a step through, for a picture."""
    shown = min(recipe.microbatches, max(layout.pp, min(recipe.microbatches, most) // layout.pp * layout.pp))
    if machine.crowding_factor(layout.num_ranks) > 1:
        return _play_crowded(shape, layout, recipe, machine.without_waiting(), shown)
    times, _ = stage_times(shape, layout, recipe, machine)
    link = link_of_axis(layout, "pp", machine, "send")
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    return simulate_step(layout.schedule, layout.pp, shown, times, link.latency_s, transfer)


def stage_times(
    shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine
) -> tuple[list[StageTimes], Exchanges]:
    """Return the seconds of one microbatch in each stage, with exchanges inside a block, and of these exchanges."""
    tokens = microbatch_tokens(layout, recipe)
    flops = forward_flops(shape, recipe.sequence_length)
    ahead, back, weights = _pass_seconds(shape, layout, recipe, machine)
    head = tokens * flops.head / ((machine.head_flops_per_s or machine.flops_per_s) * layout.tp)
    again = backward_factor(recipe.checkpointing) - 2.0
    exchanges = block_exchanges(shape, layout, recipe, machine)
    half = (exchanges.tensor + exchanges.context) / 2
    fixed = machine.microbatch_s / 2 if layout.pp > 1 else 0.0
    around = vocabulary_exchange(shape, layout, recipe, machine)
    cut = layout.tp if shape.vocab % layout.tp == 0 else 1
    counts = _layers_per_stage(shape, layout, recipe)
    times = []
    for stage, layers in enumerate(counts):
        is_last = stage == len(counts) - 1
        last = head + around / 3 if is_last else 0.0
        # gradients of whole tables, added up
        tables = (machine.first_s if stage == 0 else 0.0) + (machine.last_s if is_last else 0.0)
        ends = last + tables / cut
        if recipe.adapter is not None:
            ends = around / 3 if is_last else 0.0
        times.append(
            StageTimes(
                forward=layers * (ahead + half) + last + fixed,
                inputs=layers * (back + again * ahead + half) + last + fixed,
                weights=layers * weights + ends,
            )
        )
    return times, exchanges


def _pass_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> tuple[float, float, float]:
    """Seconds of one block and microbatch: forward, back to the inputs, and the weights' gradients."""
    tokens, flops = microbatch_tokens(layout, recipe), forward_flops(shape, recipe.sequence_length)
    products, scores = (tokens * part / (machine.flops_per_s * layout.tp) for part in (flops.block, flops.scores))
    # norms and sums lie on every tensor parallel rank, unless these share the sequence
    numbers = tokens * shape.hidden / (layout.tp if recipe.sequence_parallel else 1)
    block = 3 * (products + scores) + machine.block_s + numbers * machine.number_s
    ahead, back, weights = (block * share for share in machine.shares)
    if recipe.adapter is None:
        return ahead, back, weights
    thin = tokens * adapter_flops(shape, recipe.adapter, layout.tp) / machine.flops_per_s
    # a frozen matrix has no gradient; what else is counted there, such as half of attention's way back, remains
    return ahead + thin, back + thin, max(0.0, weights - products) + thin


def _layers_per_stage(shape: ModelShape, layout: Layout, recipe: Recipe) -> tuple[int, ...]:
    return stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)


def _played_seconds(
    shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, times: list[StageTimes]
) -> float:
    """Return the seconds of a simulated pipeline; other microbatches repeat the slowest stage's pace."""
    link = link_of_axis(layout, "pp", machine, "send")
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    played = _num_played(layout, recipe)
    length = simulate_step(layout.schedule, layout.pp, played, times, link.latency_s, transfer).length_s
    pace = max(_slowest_rank_seconds(times, layout.pp), layout.stages_per_rank * transfer)
    return length + (recipe.microbatches - played) * pace


def _shared_length(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, *, exact: bool) -> float:
    """Seconds of a pipeline of ranks that share cores; 0 without a pipeline."""
    if layout.pp == 1:
        return 0.0
    times, _ = stage_times(shape, layout, recipe, machine)
    pace = _total_work_seconds(times) * machine.crowding_factor(layout.num_ranks) / layout.pp
    if not exact:
        return recipe.microbatches * pace
    played = _num_played(layout, recipe)
    length = _play_crowded(shape, layout, recipe, machine, played).length_s
    return length + (recipe.microbatches - played) * max(pace, _slowest_rank_seconds(times, layout.pp))


def _play_crowded(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, played: int) -> Timeline:
    link = link_of_axis(layout, "pp", machine, "send")
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    times, _ = stage_times(shape, layout, recipe, machine)
    every = rank_orders(layout.schedule, layout.pp, played, layout.stages_per_rank)
    # every place of the pipeline is taken by as many ranks as share it
    lanes = layout.pp / machine.crowding_factor(layout.num_ranks)
    return play_sharing(every, times, lanes, link.latency_s + transfer)


def _num_played(layout: Layout, recipe: Recipe) -> int:
    played = min(recipe.microbatches, MAX_SIMULATED * layout.pp)
    return played - played % layout.pp if SCHEDULES[layout.schedule].chunks > 1 else played


def _slowest_rank_seconds(times: list[StageTimes], ranks: int) -> float:
    """Seconds of one microbatch on the rank that has most to do."""
    return max(_total_work_seconds(times[rank::ranks]) for rank in range(ranks))


def _total_work_seconds(times: list[StageTimes]) -> float:
    """Seconds of one microbatch in all stages together."""
    return sum(time.forward + time.inputs + time.weights for time in times)


def _quick_seconds(
    shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine, times: list[StageTimes]
) -> float:
    bubble = bubble_formula(layout.pp, recipe.microbatches, layout.stages_per_rank)
    # zero-bubble H1 waits a third of what 1F1B does where forward and both backwards take equally long
    bubble = bubble / (3 - 2 * bubble) if SCHEDULES[layout.schedule].splits_backward else bubble
    link = link_of_axis(layout, "pp", machine, "send")
    size = boundary_bytes(shape, layout, recipe)
    # a link that is slower than the stages sets the pace
    busy = recipe.microbatches * _slowest_rank_seconds(times, layout.pp)
    total = max(busy / (1 - bubble), recipe.microbatches * layout.stages_per_rank * size / link.bytes_per_s)
    return total + 2 * (layout.pp - 1) * send_seconds(size, link)


def update_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds to read and write weights, gradients and state once; bound by memory, not by arithmetic."""
    if machine.memory_bytes_per_s is None or recipe.offload != "none":
        return 0.0
    number = max_held_parameters(shape, layout, recipe).trained / (layout.num_shards if layout.zero else 1)
    moved = number * (2 * (recipe.weight_bytes + recipe.state_bytes) + recipe.weight_bytes)
    return moved / machine.memory_bytes_per_s


def _offload_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Seconds to bring gradients to the host and parameters back, and with ``all`` parameters for both passes."""
    if recipe.offload == "none" or machine.host_bytes_per_s is None:
        return 0.0
    parameters = max_held_parameters(shape, layout, recipe)
    passes = 2 * recipe.microbatches * parameters.stored
    number = parameters.trained + (parameters.trained if recipe.offload == "optimizer" else passes)
    return number / (layout.num_shards if layout.zero else 1) * recipe.weight_bytes / machine.host_bytes_per_s


def _outer_step_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Return the seconds per step of joining islands, on average: the exchange, and copies in a rank's memory."""
    if recipe.outer is None or layout.islands == 1:
        return 0.0
    layers = max(sum(_layers_per_stage(shape, layout, recipe)[rank :: layout.pp]) for rank in range(layout.pp))
    numbers = outer_numbers(max_held_parameters(shape, layout, recipe).trained, layout)
    link = link_of_axis(layout, "island", machine)
    seconds = outer_seconds(numbers, num_tensors(shape, recipe, layers), layout, recipe.outer, link)
    if machine.memory_bytes_per_s is not None:
        seconds += moved_bytes(numbers, recipe.outer) / machine.memory_bytes_per_s
    return seconds / recipe.outer.every
