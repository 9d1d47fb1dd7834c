"""What the planner must know of a run file, without torch, and the memory that the run takes by its estimate."""

from dataclasses import replace
from pathlib import Path

from phalanx.models import ModelConfig, rows_before
from phalanx.planner.cluster.catalog import known_models
from phalanx.planner.cost.memory import rank_memory
from phalanx.planner.layout import Layout
from phalanx.planner.model.adapter import adapted_linears
from phalanx.planner.model.read import read_shape, shape_of
from phalanx.planner.model.recipe import Precision, Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.train.config import DomainRun, PipelineRun, RankedRun, RunConfig

_PRECISION: dict[str, Precision] = {"fp32": "fp32", "bf16_weights": "bf16"}
"""Precisions of a run file that are no autocast, in the planner's words."""


def planned_shape(model: ModelConfig) -> ModelShape:
    """Return the shape of a run's model, from its own description alone."""
    if model.architecture is not None:
        full_shape = shape_of(model.architecture, "model.architecture")
    else:
        full_shape = known_models()[model.name] if model.name is not None else read_shape(Path(model.path or ""))
    return full_shape if model.layers is None else replace(full_shape, layers=min(model.layers, full_shape.layers))


def planned_recipe(run: RunConfig, shape: ModelShape, *, adapts: bool = True) -> Recipe:
    """Return the recipe of a run.

    Args:
        adapts: Whether the file's adapter decides the trained weights; else the caller does.
    """
    adapter = run.model.planned_adapter if adapts else None
    if adapter is not None:
        # a target that is none is said before anything is planned
        adapted_linears(shape, adapter)
    parallel = run.parallel if isinstance(run, RankedRun) else None
    return Recipe(
        sequences=run.train.batch_size,
        sequence_length=run.data.sequence_length + rows_before(run.model.adapter),
        microbatches=run.train.microbatches,
        precision=_PRECISION.get(run.train.precision, "autocast"),
        checkpointing="full" if run.model.activation_checkpointing else "none",
        fused_attention=run.model.attention == "sdpa",
        fused_activation=parallel is not None,
        adapter=adapter,
        outer=None if parallel is None or parallel.outer is None else parallel.outer.planned_outer,
    )


def planned_bytes(run: PipelineRun | DomainRun) -> int:
    """Return the bytes of all tensors of a run on this machine, by the planner's estimate.

    A middle stage of a pipeline counts once more for each shadow. Interpreters and libraries are not in it.
    """
    shape = planned_shape(run.model)
    recipe = planned_recipe(run, shape)
    if isinstance(run, DomainRun):
        layout = run.parallel.planned_layout
        sizes = [rank_memory(shape, layout, recipe, rank).total_bytes for rank in range(layout.pp)]
        return sum(sizes) * (layout.num_ranks // layout.pp)
    stages = run.pipeline.stages
    layout = Layout(pp=stages)
    sizes = [rank_memory(shape, layout, recipe, rank).total_bytes for rank in range(stages)]
    shadows = run.guard.shadows if run.guard.is_enabled else 0
    return sum(sizes) + shadows * sum(sizes[1:-1])
