"""The stages of a run with their parties, memory and expected detection, as ``--dry-run`` prints them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.models import ModelSource, estimate_costs
from phalanx.pipeline import OWNER
from phalanx.pipeline.assignment.assignment import add_second_shadows, first_assignment
from phalanx.pipeline.assignment.stage_memory import rank_bytes, stage_counts, stage_footprints
from phalanx.planner.guard.price_law import StepSize
from phalanx.telemetry import FittedTable
from phalanx.train.config import StagedRun
from phalanx.train.setup.guard_outlook import (
    idle_guard_warning,
    outlook_rows,
    predict_guard,
    preset_rows,
    price_note,
    second_shadow_note,
    short_run_note,
)
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.shown_config import shown_config

# measured on CPU with torch 2.13: interpreter, libraries, transport buffers and what malloc keeps
WORKER_BYTES = 600 * 2**20
_OWNER_BYTES = 750 * 2**20
_SHARED_BYTES = 290 * 2**20
"""What a forked worker has of the owner's imports and never writes to: Shared_Dirty of its smaps_rollup."""


@dataclass(frozen=True)
class StageEstimate:
    """One stage in the table: its layers, its parties and its needs.

    Attributes:
        layers: First and last layer, as text.
        size_bytes: Parameters in fp32.
        shadows: The parties that shadow it first, none for the owner's own.
        memory_bytes: Expected peak at the holder; `stage_footprints` defines what is counted.
    """

    index: int
    layers: str
    parameters: int
    trainable: int
    size_bytes: int
    holder: str
    shadows: tuple[str, ...]
    memory_bytes: int
    shadow_bytes: int

    @property
    def shadow(self) -> str | None:
        """The shadow that audits the stage first, None for the owner's own."""
        return next(iter(self.shadows), None)


def estimate_stages(run: StagedRun, source: ModelSource, workers: Sequence[str] | None = None) -> list[StageEstimate]:
    """Return the stage table with expected memory; `workers` are the participants, all of the run's when None."""
    plan = make_plan(run, source)
    names = run.pipeline.worker_names if workers is None else workers
    first = first_assignment(len(plan.stages), names, guarded=run.guard.is_enabled)
    if run.guard.shadows > 1:
        first = add_second_shadows(first, None, names)
    rows = []
    for stage, (layers, needs) in enumerate(zip(plan.stages, stage_footprints(plan), strict=True)):
        counts = stage_counts(plan, stage)
        rows.append(
            StageEstimate(
                index=stage,
                layers=f"{layers.first_layer}-{layers.end_layer - 1}",
                parameters=counts.parameters,
                trainable=counts.trainable,
                size_bytes=counts.size_bytes,
                holder=first.holders[stage],
                shadows=first.shadows_of(stage),
                memory_bytes=needs.held,
                shadow_bytes=needs.shadowed,
            )
        )
    return rows


def describe_stages(run: StagedRun, source: ModelSource) -> RenderableType:
    """The resolved config and the stage table, for the terminal."""
    return Group(shown_config(run), stages_of(run, source))


def stages_of(run: StagedRun, source: ModelSource) -> RenderableType:
    """Return the stages with their parties and memory, and the guard's findings and cost."""
    rows = estimate_stages(run, source)
    # a column that says nothing new only takes room from the others
    some_are_frozen = any(row.trainable != row.parameters for row in rows)
    trained = ("trained",) if some_are_frozen else ()
    cells = [
        (
            str(row.index),
            row.layers,
            f"{row.parameters:,}",
            *((f"{row.trainable:,}",) if some_are_frozen else ()),
            _format_mebibytes(row.size_bytes),
            _format_mebibytes(row.memory_bytes),
            row.holder,
            ", ".join(row.shadows) or "-",
        )
        for row in rows
    ]
    table = FittedTable(
        ("stage", "layers", "parameters", *trained, "size", "memory, expected", "holder", "shadow"),
        cells,
        title=f"{run.pipeline.stages} stages, {run.train.microbatches} microbatches, {run.pipeline.schedule}",
        left=("holder", "shadow"),
    )
    forked = bool(run.pipeline.worker_names) and not run.pipeline.remote_workers and run.train.device == "cpu"
    return Group(
        table, _memory_note(rows, forked=forked), *_party_ranks(run, rows, source), *_guard_notes(run, rows, source)
    )


def _party_ranks(run: StagedRun, rows: Sequence[StageEstimate], source: ModelSource) -> list[RenderableType]:
    """What the ranks of parties that have several need for the stages that they serve first."""
    plan = make_plan(run, source)
    shared = [row for row in rows if row.holder != OWNER and run.pipeline.layout_of(row.holder).num_ranks > 1]
    if not shared:
        return []
    cells = []
    for row in shared:
        layout = run.pipeline.layout_of(row.holder)
        needs = rank_bytes(plan, row.index, layout)
        sizes = (_format_mebibytes(needs.first), _format_mebibytes(needs.other))
        cells.append((row.holder, str(row.index), layout.short_description, str(layout.num_ranks), *sizes))
    table = FittedTable(
        ("party", "stage", "layout", "processes", "memory of rank 0", "of each other"),
        cells,
        title=f"{run.world['processes']} processes; parties of several ranks",
        left=("party", "layout"),
    )
    return [table]


def step_size(run: StagedRun, source: ModelSource) -> StepSize | None:
    """Return the size of a step, as the price law of the guard needs it; None where no stage is in other hands."""
    return _size_of_rows(run, estimate_stages(run, source), source)


def _size_of_rows(run: StagedRun, rows: Sequence[StageEstimate], source: ModelSource) -> StepSize | None:
    others = [row for row in rows if row.holder != OWNER]
    if not others:
        return None
    first, last = (int(row.layers.split("-")[side]) for row, side in ((others[0], 0), (others[-1], 1)))
    rows_per_microbatch, length, width = make_plan(run, source).hidden_shape
    return StepSize(
        parameters=sum(row.parameters for row in rows),
        watched_parameters=sum(row.trainable for row in others),
        watched_share=(last - first + 1) / (source.num_layers + sum(estimate_costs(source.hub_config))),
        watched_stages=len(others),
        stages=len(rows),
        microbatches=run.train.microbatches,
        tokens=rows_per_microbatch * length * run.train.microbatches,
        width=width,
    )


def _guard_notes(run: StagedRun, rows: Sequence[StageEstimate], source: ModelSource) -> list[RenderableType]:
    """Return notes on the guard's findings and cost, or that it has nothing to check."""
    nobody = idle_guard_warning(run)
    if nobody is not None:
        return [Text(nobody, style="yellow")]
    size = _size_of_rows(run, rows, source)
    expected = None if size is None else predict_guard(run, size)
    if expected is None:
        return []
    lines = outlook_rows(expected[0])
    table = FittedTable(
        tuple(lines[0]),
        [tuple(line.values()) for line in lines],
        title="one worker's stage that lies in every step",
        left=tuple(lines[0]),
    )
    presets = [] if size is None else preset_rows(run, size)
    choice = FittedTable(
        tuple(presets[0]), [tuple(row.values()) for row in presets], title="presets for this run", left=("preset",)
    )
    second = None if size is None else second_shadow_note(run, size)
    notes = [short_run_note(expected[0], run.train.steps), price_note(run.guard, expected[1]), second]
    return [table, choice, *(note for note in notes if note is not None)]


def memory_by_party(rows: Sequence[StageEstimate]) -> dict[str, int]:
    """Return the expected memory of each process in bytes: its stages, its shadows, and its own needs."""
    totals: dict[str, int] = {}
    for row in rows:
        for name in (row.holder, *row.shadows):
            totals.setdefault(name, _OWNER_BYTES if name == OWNER else WORKER_BYTES)
        totals[row.holder] += row.memory_bytes
        for shadow in row.shadows:
            totals[shadow] += row.shadow_bytes
    return totals


def _memory_note(rows: Sequence[StageEstimate], *, forked: bool) -> str:
    parts = ", ".join(f"{name} {_format_mebibytes(size)}" for name, size in sorted(memory_by_party(rows).items()))
    shared = (
        f"; forked on this machine (Linux), they share about {_format_mebibytes(_SHARED_BYTES)} of it" if forked else ""
    )
    return f"expected memory with interpreter, libraries and transport buffers: {parts}{shared}"


def _format_mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
