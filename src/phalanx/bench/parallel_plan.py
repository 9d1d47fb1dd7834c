"""What the planner says about a layout on this machine, beside what was measured."""

from dataclasses import dataclass, replace
from typing import Any

from phalanx.parallel import ParallelConfig
from phalanx.planner import ModelShape, shape_of
from phalanx.planner.catalog import device_of
from phalanx.planner.estimate import machine_of
from phalanx.planner.hardware import Cluster
from phalanx.planner.layout import Layout
from phalanx.planner.memory import Memory, worst_rank
from phalanx.planner.recipe import Recipe
from phalanx.planner.step import Machine, stage_times, step_time, timeline
from phalanx.train import RunConfig


@dataclass(frozen=True)
class Planned:
    """One layout's figures before it runs.

    Attributes:
        step_s: Wall seconds of a step.
        cpu_s: CPU seconds of a step, all ranks together.
        bubble: Share of the pipeline ranks' time in which they wait; None without a pipeline.
        idle: Share of all ranks' time in which they do nothing.
    """

    step_s: float
    cpu_s: float
    bubble: float | None
    idle: float


def plan_layout(run: RunConfig, config: ParallelConfig, on_wall: Cluster, on_cpu: Cluster) -> Planned:
    """Plan one layout of a run.

    Args:
        run: What is trained.
        config: Its layout.
        on_wall: This machine by wall seconds.
        on_cpu: The same by CPU seconds.
    """
    shape, recipe, layout = shape_of(run.model.architecture or {}), recipe_of(run, config), config.layout
    wall = _machine(on_wall, layout)
    step = step_time(shape, layout, recipe, wall).total
    cpu = _cpu_seconds(shape, layout, recipe, _machine(on_cpu, layout))
    bubble = timeline(shape, layout, recipe, wall, recipe.microbatches).bubble if layout.pp > 1 else None
    return Planned(step, cpu, bubble, max(0.0, 1.0 - cpu / (layout.world * step)))


def plan_memory(run: RunConfig, config: ParallelConfig) -> Memory:
    """The memory of the rank that needs most."""
    return worst_rank(shape_of(run.model.architecture or {}), config.layout, recipe_of(run, config))


def recipe_of(run: RunConfig, config: ParallelConfig) -> Recipe:
    """How a run is trained, in the planner's words."""
    return Recipe(
        sequences=run.train.batch_size,
        sequence_length=run.data.sequence_length,
        microbatches=run.train.microbatches,
        precision="fp32" if run.train.precision == "fp32" else "autocast",
        optimizer="sgd" if run.optimizer.kind == "sgd" else "adamw",
        checkpointing=config.activation_checkpointing,
        offload="all" if config.offload else "none",
        sequence_parallel=config.sequence_parallel,
        fused_attention=run.model.attention == "sdpa",
    )


def beside(planned: Planned, step_s: float, cpu_s: float, world: int) -> dict[str, Any]:
    """The keys of a row of the block ``plan``.

    Args:
        planned: From `plan_layout`.
        step_s: Measured wall seconds of a step.
        cpu_s: Measured CPU seconds of a step, all ranks together.
        world: How many ranks there were.
    """
    return {
        "planned_step_s": planned.step_s,
        "step_s": step_s,
        "step_ratio": planned.step_s / step_s,
        "planned_cpu_s": planned.cpu_s,
        "cpu_s": cpu_s,
        "cpu_ratio": planned.cpu_s / cpu_s,
        "planned_bubble": planned.bubble,
        "planned_idle": planned.idle,
        "idle": max(0.0, 1.0 - cpu_s / (world * step_s)),
    }


def _machine(cluster: Cluster, layout: Layout) -> Machine:
    machine = machine_of(cluster, device_of(cluster, cluster.pools[0].device), "fp32")
    return replace(machine, per_node=layout.world)


def _cpu_seconds(shape: ModelShape, layout: Layout, recipe: Recipe, machine: Machine) -> float:
    """Work and exchanges of all ranks; waiting takes none."""
    times, _ = stage_times(shape, layout, recipe, machine)
    passes = sum(time.forward + time.inputs + time.weights for time in times) * recipe.microbatches
    step = step_time(shape, layout, recipe, machine)
    return passes * layout.world / layout.pp + (step.data + step.optimizer) * layout.world
