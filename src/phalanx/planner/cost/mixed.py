"""Pools of different devices: one pipeline over all of them, with as many layers for each as it can bear."""

from dataclasses import dataclass
from functools import cache

from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import device_of, link_of
from phalanx.planner.cluster.hardware import Cluster, Device
from phalanx.planner.cluster.links import all_reduce
from phalanx.planner.cost.estimate import Estimate, machine_of, totals_of
from phalanx.planner.cost.memory import RankMemory, memory_of, rank_parameters
from phalanx.planner.cost.partition import Fits, rank_placements, uneven_layers
from phalanx.planner.cost.schedule import StageTimes, Timeline, simulate_step
from phalanx.planner.cost.step import StepTime
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import boundary_bytes, microbatch_tokens
from phalanx.planner.model.compute import backward_factor, forward_flops, model_flops
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES


@dataclass(frozen=True)
class StageDevices:
    """Devices in the order of a pipeline, with the layers of each."""

    devices: tuple[str, ...]
    layers: tuple[int, ...]


def mixed_layouts(cluster: Cluster) -> list[Layout]:
    """Return the layouts of a mixed pool: as many equal pipelines as every pool can be shared among."""
    counts = [pool.count for pool in cluster.pools]
    return [
        Layout(dp=dp, pp=cluster.num_devices // dp, schedule=schedule)
        for dp in range(1, min(counts) + 1)
        if all(count % dp == 0 for count in counts)
        # of two that take equally long the first is taken: the one that holds less
        for schedule in sorted(SCHEDULES, key=lambda name: SCHEDULES[name].fills_first)
        if SCHEDULES[schedule].chunks == 1
    ]


def place_pipeline(shape: ModelShape, layout: Layout, recipe: Recipe, cluster: Cluster) -> StageDevices | None:
    """Return the order of devices and the layers of each that make the slowest stage fastest.

    Returns:
        None when no order fits into the devices' memory.
    """
    kinds = [pool.device for pool in cluster.pools for _ in range(pool.count // layout.dp)]
    flops = forward_flops(shape, recipe.sequence_length)
    costs = [float(flops.block + flops.scores)] * shape.layers
    costs[-1] += flops.head
    speeds = {kind: _device_speed(cluster, kind, recipe) for kind in set(kinds)}
    best: tuple[float, StageDevices] | None = None
    for order in rank_placements(kinds, lambda kind: device_of(cluster, kind).memory_bytes):
        fits = _fits_memory(shape, layout, recipe, cluster, order)
        layers = uneven_layers(costs, [speeds[kind] for kind in order], fits)
        if layers is None:
            continue
        pace = _slowest_pace(shape, recipe, layers, [speeds[kind] for kind in order])
        if best is None or pace < best[0]:
            best = (pace, StageDevices(order, layers))
    return None if best is None else best[1]


def estimate_mixed(
    shape: ModelShape,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    placed: StageDevices,
    tokens: float | None = None,
) -> Estimate:
    """Estimate a placed pipeline; its figures have the meaning of `estimate`, its memory is the tightest rank's."""
    devices = [device_of(cluster, kind) for kind in placed.devices]
    times = mixed_times(shape, layout, recipe, cluster, placed)
    played = mixed_timeline(shape, layout, recipe, cluster, placed, recipe.microbatches)
    busy = max(time.forward + time.inputs + time.weights for time in times) * recipe.microbatches
    data, update = _exchange_seconds(shape, layout, recipe, cluster, placed)
    step = StepTime(busy, 0.0, 0.0, played.length_s - busy, data, update, 0.0, 0.0, 0.0)
    tight, memory = _tightest_memory(shape, layout, recipe, cluster, placed)
    per_s = recipe.tokens_per_step / step.total_seconds
    peak = sum(device.peak_flops(recipe.precision) or 0.0 for device in devices) * layout.dp
    used = [(device, layout.dp) for device in devices]
    return Estimate(
        layout=layout,
        recipe=recipe,
        memory=memory,
        limit=tight.memory_bytes * cluster.usable_memory,
        step=step,
        tokens_per_s=per_s,
        mfu=per_s * model_flops(shape, recipe.sequence_length) / peak,
        totals=None if tokens is None else totals_of(tokens, per_s, cluster, used),
        layers=placed.layers,
        devices=placed.devices,
    )


def mixed_times(
    shape: ModelShape, layout: Layout, recipe: Recipe, cluster: Cluster, placed: StageDevices
) -> list[StageTimes]:
    """Return the seconds of one microbatch in each stage."""
    tokens = microbatch_tokens(layout, recipe)
    flops = forward_flops(shape, recipe.sequence_length)
    again = backward_factor(recipe.checkpointing) - 2.0
    times = []
    for stage, (kind, layers) in enumerate(zip(placed.devices, placed.layers, strict=True)):
        speed = _device_speed(cluster, kind, recipe)
        blocks = layers * tokens * (flops.block + flops.scores) / speed
        head = tokens * flops.head / speed if stage == len(placed.layers) - 1 else 0.0
        times.append(StageTimes(blocks + head, blocks * (1 + again) + head, blocks + head))
    return times


def mixed_timeline(
    shape: ModelShape, layout: Layout, recipe: Recipe, cluster: Cluster, placed: StageDevices, microbatches: int
) -> Timeline:
    """Play a placed pipeline through."""
    times = mixed_times(shape, layout, recipe, cluster, placed)
    link = link_of(cluster, "between")
    transfer = boundary_bytes(shape, layout, recipe) / link.bytes_per_s
    return simulate_step(layout.schedule, layout.pp, microbatches, times, link.latency_s, transfer)


def _device_speed(cluster: Cluster, kind: str, recipe: Recipe) -> float:
    return machine_of(cluster, device_of(cluster, kind), recipe.precision).flops_per_s


def _fits_memory(shape: ModelShape, layout: Layout, recipe: Recipe, cluster: Cluster, order: tuple[str, ...]) -> Fits:
    limits = [device_of(cluster, kind).memory_bytes * cluster.usable_memory for kind in order]

    @cache
    def needed(stage: int, layers: int) -> int:
        return memory_of(shape, layout, recipe, (layers,), stage).total_bytes

    return lambda stage, first, end: needed(stage, end - first) <= limits[stage]


def _slowest_pace(shape: ModelShape, recipe: Recipe, layers: tuple[int, ...], speeds: list[float]) -> float:
    flops = forward_flops(shape, recipe.sequence_length)
    work = [count * (flops.block + flops.scores) for count in layers]
    work[-1] += flops.head
    return max(cost / speed for cost, speed in zip(work, speeds, strict=True))


def _exchange_seconds(
    shape: ModelShape, layout: Layout, recipe: Recipe, cluster: Cluster, placed: StageDevices
) -> tuple[float, float]:
    """Return seconds of the slowest exchange of gradients, none of it hidden, and of the slowest update."""
    data = update = 0.0
    for rank, (kind, layers) in enumerate(zip(placed.devices, placed.layers, strict=True)):
        number = rank_parameters(shape, layout, layers, rank)
        if layout.dp > 1:
            size = number * recipe.weight_bytes
            data = max(data, all_reduce(size, layout.dp, link_of(cluster, "between")))
        bandwidth = device_of(cluster, kind).bandwidth_gb_per_s
        if bandwidth is not None:
            moved = number * (3 * recipe.weight_bytes + 2 * recipe.state_bytes)
            update = max(update, moved / (bandwidth * 1e9))
    return data, update


def _tightest_memory(
    shape: ModelShape, layout: Layout, recipe: Recipe, cluster: Cluster, placed: StageDevices
) -> tuple[Device, RankMemory]:
    if len(placed.devices) != layout.pp:
        raise ConfigError(f"mixed pool: {len(placed.devices)} devices for pp={layout.pp}; give one for each rank")
    ranks = []
    for rank, (kind, layers) in enumerate(zip(placed.devices, placed.layers, strict=True)):
        ranks.append((device_of(cluster, kind), memory_of(shape, layout, recipe, (layers,), rank)))
    return max(ranks, key=lambda item: item[1].total_bytes / item[0].memory_bytes)
