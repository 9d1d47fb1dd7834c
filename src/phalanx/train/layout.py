"""A run file and a model to the plan that every party gets, and the tables that --dry-run prints."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table

from phalanx.config import digest, dump_toml
from phalanx.errors import ConfigError
from phalanx.models import ModelSource, StageSpec, estimate_costs, partition, stage_table
from phalanx.pipeline import OWNER, StageRange, StepPlan
from phalanx.pipeline.recovery import first_assignment
from phalanx.train.config import RunConfig

# measured on CPU with torch 2.13: interpreter, libraries, transport buffers and what malloc keeps
_WORKER_BYTES = 600 * 2**20
_OWNER_BYTES = 750 * 2**20


def cut(run: RunConfig, source: ModelSource) -> tuple[StageSpec, ...]:
    """The stages' layers, balanced over the processes by estimated cost unless the run file gives them.

    The owner has the first and the last stage, so both together get about as much work as one worker.

    Raises:
        ConfigError: The model has too few layers for so many stages.
    """
    embedding, head = estimate_costs(source.hub_config)
    return partition(
        source.num_layers, run.pipeline.stages, run.pipeline.layers, embedding, head, ends_in_one_process=True
    )


def make_plan(run: RunConfig, source: ModelSource) -> StepPlan:
    """Everything that a party must know to build and run its stages.

    Raises:
        ConfigError: Run file and model do not fit.
    """
    longest = getattr(source.hub_config, "max_position_embeddings", None)
    if longest is not None and run.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length = {run.data.sequence_length}: the model has positions for {longest}; lower it"
        )
    return StepPlan(
        run_digest=digest(run),
        hub_config=source.hub_config_dict,
        hidden_size=source.hidden_size,
        stages=tuple(StageRange(first_layer=s.first_layer, end_layer=s.end_layer) for s in cut(run, source)),
        schedule=run.pipeline.schedule,
        microbatches=run.train.microbatches,
        microbatch_size=run.train.batch_size // run.train.microbatches,
        sequence_length=run.data.sequence_length,
        total_steps=run.train.steps,
        seed=run.train.seed,
        precision=run.train.precision,
        device=run.train.device,
        attention=run.model.attention,
        activation_checkpointing=run.model.activation_checkpointing,
        adapter=run.model.adapter,
        optimizer=run.optimizer,
        guard=run.guard,
    )


@dataclass(frozen=True)
class StageEstimate:
    """One stage in the table: what it is, who has it, what it needs.

    Attributes:
        index: The stage.
        layers: First and last layer, as text.
        parameters: Numbers held.
        trainable: Numbers trained.
        size_bytes: Parameters in fp32.
        holder: Who serves it first.
        shadow: Who covers it first, None for the owner's own.
        memory_bytes: Expected peak at the holder: weights, gradients, moments and activations in flight.
        shadow_bytes: Expected at the shadow: weights, gradients, moments and the last step's undo copy; where it only
            verifies, weights, and gradients while it audits a whole step; where it serves a lane, what a holder needs
            and the evidence of the last step.
    """

    index: int
    layers: str
    parameters: int
    trainable: int
    size_bytes: int
    holder: str
    shadow: str | None
    memory_bytes: int
    shadow_bytes: int


def estimate_stages(run: RunConfig, source: ModelSource, workers: Sequence[str] | None = None) -> list[StageEstimate]:
    """Stage table with expected memory; `workers` are those that take part, all of the run's if None.

    Activations are counted as 16 numbers of the hidden size per token and layer, the measured count
    for a block with fused attention, plus the logits and their gradient at the last stage.
    """
    specs = cut(run, source)
    first = first_assignment(
        len(specs), run.pipeline.workers if workers is None else workers, guarded=run.guard.enabled
    )
    tokens = run.train.batch_size // run.train.microbatches * run.data.sequence_length
    # both copies then have both lanes' gradients, and both run microbatches
    shared = run.guard.enabled and run.guard.shadow == "replica"
    rows = []
    for spec, row in zip(specs, stage_table(source.hub_config, specs, run.model.adapter), strict=True):
        gpipe = run.pipeline.schedule == "gpipe"
        in_flight = run.train.microbatches if gpipe else min(run.train.microbatches, len(specs) - spec.index)
        activations = 4 * 16 * tokens * source.hidden_size * spec.num_layers
        if spec.is_last:
            activations += 2 * 4 * tokens * source.vocab_size
        second = (4 if run.guard.verify_only else 24) * row.trainable
        # every holder keeps a snapshot as well, the owner too
        own_snapshot = 12 * row.trainable if run.guard.keeps_snapshots else 0
        if shared:
            second = 32 * row.trainable + in_flight * activations
        rows.append(
            StageEstimate(
                index=spec.index,
                layers=f"{spec.first_layer}-{spec.end_layer - 1}",
                parameters=row.parameters,
                trainable=row.trainable,
                size_bytes=row.size_bytes,
                holder=first.holders[spec.index],
                shadow=first.shadows.get(spec.index),
                memory_bytes=row.size_bytes
                + (16 if shared else 12) * row.trainable
                + own_snapshot
                + in_flight * activations,
                shadow_bytes=row.size_bytes + second,
            )
        )
    return rows


def describe_stages(run: RunConfig, source: ModelSource) -> RenderableType:
    """The resolved config and the stage table, for the terminal."""
    table = Table(title=f"{run.pipeline.stages} stages, {run.train.microbatches} microbatches, {run.pipeline.schedule}")
    for name in ("stage", "layers", "parameters", "trained", "size", "memory, expected", "holder", "shadow"):
        table.add_column(name, justify="left" if name in ("holder", "shadow") else "right")
    rows = estimate_stages(run, source)
    for row in rows:
        table.add_row(
            str(row.index),
            row.layers,
            f"{row.parameters:,}",
            f"{row.trainable:,}",
            _mebibytes(row.size_bytes),
            _mebibytes(row.memory_bytes),
            row.holder,
            row.shadow or "-",
        )
    return Group(Syntax(dump_toml(run), "toml", background_color="default"), table, _memory_note(rows))


def memory_by_party(rows: Sequence[StageEstimate]) -> dict[str, int]:
    """Expected memory of each process in bytes: what it holds, what it shadows, and what it needs for itself."""
    totals: dict[str, int] = {}
    for row in rows:
        for name in (row.holder, row.shadow):
            if name is not None:
                totals.setdefault(name, _OWNER_BYTES if name == OWNER else _WORKER_BYTES)
        totals[row.holder] += row.memory_bytes
        if row.shadow is not None:
            totals[row.shadow] += row.shadow_bytes
    return totals


def _memory_note(rows: Sequence[StageEstimate]) -> str:
    parts = ", ".join(f"{name} {_mebibytes(size)}" for name, size in sorted(memory_by_party(rows).items()))
    return f"expected memory with interpreter, libraries and transport buffers: {parts}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
