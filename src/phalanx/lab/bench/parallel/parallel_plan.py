"""The planner's estimate of a layout on this machine, beside the measurement."""

from dataclasses import dataclass, replace
from typing import Any

from phalanx.parallel import ParallelConfig
from phalanx.planner import shape_of
from phalanx.planner.cluster.catalog import device_of
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cost.estimate import machine_of
from phalanx.planner.cost.memory import RankMemory, worst_rank
from phalanx.planner.cost.step import play_timeline, step_time, work_seconds
from phalanx.planner.model.recipe import Recipe
from phalanx.train import PipelineRun


@dataclass(frozen=True)
class PlannedFigures:
    """One layout's figures before it runs.

    Attributes:
        bubble: Share of the step in which the ranks of a pipeline wait for each other, and not for a core; None
            without a pipeline.
        idle: Share of all ranks' time in which they do nothing.
    """

    step_s: float
    cpu_s: float
    bubble: float | None
    idle: float


def plan_layout(run: PipelineRun, config: ParallelConfig, cluster: Cluster) -> PlannedFigures:
    """Plan one layout of a run."""
    shape, recipe, layout = shape_of(run.model.architecture or {}), recipe_of(run, config), config.planned_layout
    machine = replace(
        machine_of(cluster, device_of(cluster, cluster.pools[0].device), "fp32"), per_node=layout.num_ranks
    )
    step = step_time(shape, layout, recipe, machine).total_seconds
    cpu = work_seconds(shape, layout, recipe, machine)
    idle = max(0.0, 1.0 - cpu / (layout.num_ranks * step))
    if layout.pp == 1:
        return PlannedFigures(step, cpu, None, idle)
    played = play_timeline(shape, layout, recipe, machine, recipe.microbatches)
    # where cores are shared, a rank that waits for one is not waiting for another rank
    waiting = idle if machine.crowding_factor(layout.num_ranks) == 1.0 else played.bubble_share * played.length_s / step
    return PlannedFigures(step, cpu, waiting, idle)


def plan_memory(run: PipelineRun, config: ParallelConfig) -> RankMemory:
    """The memory of the rank that needs most."""
    return worst_rank(shape_of(run.model.architecture or {}), config.planned_layout, recipe_of(run, config))


def recipe_of(run: PipelineRun, config: ParallelConfig) -> Recipe:
    """Return the recipe of a run on CPUs for the planner; offloading moves nothing there."""
    return Recipe(
        sequences=run.train.batch_size,
        sequence_length=run.data.sequence_length,
        microbatches=run.train.microbatches,
        precision="fp32" if run.train.precision == "fp32" else "autocast",
        optimizer=run.optimizer.kind,
        checkpointing=config.activation_checkpointing,
        sequence_parallel=config.sequence_parallel,
        fused_attention=run.model.attention == "sdpa",
        adapter=run.model.planned_adapter,
        outer=None if config.outer is None else config.outer.planned_outer,
    )


def compare_with_plan(
    planned: PlannedFigures, step_s: float, cpu_s: float, waiting: float | None, world: int
) -> dict[str, Any]:
    """The keys of a row of the block ``plan``.

    Args:
        planned: Figures of `plan_layout`.
        waiting: Measured share of the ranks' time in which they neither worked nor wanted to; None where the system
            does not tell.
    """
    bubble = waiting if planned.bubble is not None else None
    return {
        "planned_step_s": planned.step_s,
        "step_s": step_s,
        "step_ratio": planned.step_s / step_s,
        "planned_cpu_s": planned.cpu_s,
        "cpu_s": cpu_s,
        "cpu_ratio": planned.cpu_s / cpu_s,
        "planned_bubble": planned.bubble,
        "bubble": bubble,
        "bubble_ratio": None if not bubble or planned.bubble is None else planned.bubble / bubble,
        "planned_idle": planned.idle,
        "idle": max(0.0, 1.0 - cpu_s / (world * step_s)),
    }
