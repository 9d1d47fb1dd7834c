"""A run file and a model to the plan that every party gets, and the tables that --dry-run prints."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.config import digest
from phalanx.errors import ConfigError
from phalanx.models import (
    FAMILIES,
    MARKED_KINDS,
    AttentionKind,
    ModelSource,
    PrefixConfig,
    PromptEncoderConfig,
    StageSpec,
    estimate_costs,
    partition,
    without_path,
)
from phalanx.models.layout import check_length
from phalanx.objectives import OBJECTIVES, RowAttention, objective_of
from phalanx.objectives.pretraining import DenoisersSettings
from phalanx.pipeline import OWNER, StageRange, StepPlan
from phalanx.pipeline.assignment.assignment import first_assignment
from phalanx.pipeline.assignment.stage_memory import footprints, rank_bytes, stage_counts
from phalanx.planner.model.optimizers import OPTIMIZERS
from phalanx.split import cut_model
from phalanx.telemetry import FittedTable
from phalanx.train.config import RunConfig
from phalanx.train.setup.guard_outlook import guarded_by_nobody, outlook, outlook_rows, price_note
from phalanx.train.setup.preflight import require_extras
from phalanx.train.setup.private_stages import check_private_model
from phalanx.train.setup.shown_config import shown_config

# measured on CPU with torch 2.13: interpreter, libraries, transport buffers and what malloc keeps
WORKER_BYTES = 600 * 2**20
_OWNER_BYTES = 750 * 2**20
_SHARED_BYTES = 290 * 2**20
"""What a forked worker has of the owner's imports and never writes to: Shared_Dirty of its smaps_rollup."""


def cut(run: RunConfig, source: ModelSource) -> tuple[StageSpec, ...]:
    """The stages' layers, balanced over the processes by estimated cost unless the run file gives them.

    The owner has the first and the last stage, so both together get about as much work as one worker. The stages of a
    split are those of the enclave's part.

    Raises:
        ConfigError: The model has too few layers for so many stages.
    """
    embedding, head = estimate_costs(source.hub_config)
    stages, layers = run.pipeline.stages, run.pipeline.layers
    if run.split is None:
        return partition(source.num_layers, stages, layers, embedding, head, ends_in_one_process=True)
    front, back = cut_model(source.num_layers, run.split.cut)
    # clients embed
    return partition(back.num_layers, stages, layers, 0.0, head, ends_in_one_process=True, front=front.end_layer)


def check_head(run: RunConfig, source: ModelSource) -> None:
    """Check that the model gives for each token the output that the objective reads.

    Raises:
        ConfigError: It gives something else.
    """
    head = objective_of(run.train.objective).head
    if source.head != head:
        raise ConfigError(
            f'model.head: the model returns "{source.head}" for each token, but train.objective = '
            f'"{run.train.objective_kind}" needs "{head}"; set model.head = "{head}"'
        )
    if run.train.samples is not None and head == "score":
        raise ConfigError("train.samples: a model with a scoring head cannot write texts; remove it")
    if run.train.samples is not None and source.family.facts.predicts != "next":
        raise ConfigError(
            f"train.samples: {source.family.model_type} has an encoder, and only decoders can continue texts; remove it"
        )


def make_plan(run: RunConfig, source: ModelSource) -> StepPlan:
    """Everything that a party must know to build and run its stages.

    Raises:
        ConfigError: Run file and model do not fit.
    """
    if FAMILIES[source.hub_config.model_type].facts.routed and run.guard.classes == "mixed":
        raise ConfigError(
            f'guard.classes = "mixed": {source.hub_config.model_type} has experts, and another rounding may choose '
            'other experts, which looks like a lie; set guard.classes = "one"'
        )
    require_extras(run)
    check_length(run.data.sequence_length, getattr(source.hub_config, "max_position_embeddings", None))
    check_virtual_tokens(run, source)
    check_private_model(run, source)
    _check_masters(run, source)
    _check_few_bits(run)
    return StepPlan(
        family=run.model.family,
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
        precision="fp32" if run.train.precision == "fp16" else run.train.precision,
        device=run.train.device,
        attention=run.model.attention,
        activation_checkpointing=run.model.activation_checkpointing,
        adapter=without_path(run.model.sliced_adapter),
        optimizer=run.optimizer,
        guard=run.guard,
        objective=run.train.objective,
        document_attention=attends_in_documents(run, source),
        neftune_alpha=run.train.neftune_alpha,
        attention_kind=attention_of(run, source),
    )


def check_virtual_tokens(run: RunConfig, source: ModelSource) -> None:
    """Refuse virtual tokens for which a table of positions has no room, and rows that they cannot come before.

    Raises:
        ConfigError: Says how much room there is, or why not.
    """
    adapter, longest = run.model.adapter, source.family.max_positions(source.hub_config)
    if not isinstance(adapter, PrefixConfig | PromptEncoderConfig):
        return
    kind = attention_kind(run, source)
    if kind != "causal":
        raise ConfigError(
            f'model.adapter.kind = "{adapter.kind}": virtual tokens need causal rows, but this run has {kind} '
            'attention; set kind = "lora"'
        )
    if isinstance(adapter, PromptEncoderConfig) and run.train.neftune_alpha is not None:
        raise ConfigError(
            f'model.adapter.kind = "{adapter.kind}" with train.neftune_alpha: the noise applies to tokens of a '
            "text, but the first ones here are virtual; remove one"
        )
    if longest is not None and run.data.sequence_length + adapter.tokens > longest:
        raise ConfigError(
            f"model.adapter.tokens = {adapter.tokens}: each takes a position, but data.sequence_length = "
            f"{run.data.sequence_length} leaves {longest - run.data.sequence_length} of the model's {longest}; "
            "lower one of the two"
        )


def _check_masters(run: RunConfig, source: ModelSource) -> None:
    """Refuse what stages with bf16 weights cannot do.

    Raises:
        ConfigError: Says which, and what to do.
    """
    if run.train.precision != "bf16_weights":
        return
    shared = run.pipeline.layout is not None or bool(run.pipeline.layouts)
    faults = {
        'guard.classes = "mixed": its tolerance is known for float32 weights only; set "one"': (
            run.guard.classes == "mixed"
        ),
        "data.attention: document numbers accompany hidden states, but bf16 cannot represent them": (
            attends_in_documents(run, source)
        ),
        "a prefix in its rows: its end accompanies hidden states, but bf16 cannot represent it": (
            attention_of(run, source) in MARKED_KINDS
        ),
        "model.adapter.quantize: unpacked matrices would be rounded twice": run.model.quantize is not None,
        "pipeline.layout: ranks of a party divide float32 weights; remove it": shared,
    }
    for feature, holds in faults.items():
        if holds:
            raise ConfigError(f'train.precision = "bf16_weights" with {feature}; or use "bf16"')


def _check_few_bits(run: RunConfig) -> None:
    """Refuse moments of a byte a number where bits are not kept.

    Raises:
        ConfigError: Says which, and what to do.
    """
    if not OPTIMIZERS[run.optimizer.kind].in_bytes:
        return
    faults = {
        'guard.classes = "mixed": different rounding of a moment may change its byte; set "one"': (
            run.guard.classes == "mixed"
        ),
        "pipeline.layout: ranks of a party divide float32 moments; remove it": (
            run.pipeline.layout is not None or bool(run.pipeline.layouts)
        ),
    }
    for feature, holds in faults.items():
        if holds:
            raise ConfigError(f'optimizer.kind = "{run.optimizer.kind}" with {feature}; or use "adamw"')


def attention_of(run: RunConfig, source: ModelSource) -> RowAttention:
    """Return which tokens see which, as far as the objective says it.

    Raises:
        ConfigError: The model's family has no such attention.
    """
    family, kind = FAMILIES[source.hub_config.model_type], attention_asked(run)
    needs, has = f"{kind} attention", f"only {', '.join(sorted(family.attention_kinds))}"
    settings = run.train.objective
    hides = isinstance(settings, DenoisersSettings) and any(part.kind == "masked" for part in settings.parts)
    if family.facts.predicts == "target" and hides:
        # hidden tokens are predicted where they stood, and that is the encoder's text
        needs, has = "only logits of the decoder's text", "only those of what a decoder writes"
    elif kind in family.attention_kinds:
        return kind
    raise ConfigError(
        f'train.objective = "{run.train.objective_kind}": its rows need {needs}, but {family.model_type} has {has}; '
        "choose another objective or model"
    ).about(code="PHX-C025", key="train.objective", found=run.train.objective_kind)


def attention_asked(run: RunConfig) -> RowAttention:
    """Return which tokens see which by the objective, whatever the model can do."""
    objective = OBJECTIVES.get(run.train.objective_kind)
    return "causal" if objective is None else objective.attention


def attention_kind(run: RunConfig, source: ModelSource) -> AttentionKind:
    """Return which tokens see which: inside documents, or as the objective says it.

    Raises:
        ConfigError: The model's family has no such attention.
    """
    return "documents" if attends_in_documents(run, source) else attention_of(run, source)


def attends_in_documents(run: RunConfig, source: ModelSource) -> bool:
    """Whether attention stays inside documents.

    Raises:
        ConfigError: The model's family cannot do that.
    """
    if run.data.attention == "across":
        return False
    model_type = source.hub_config.model_type
    if "documents" not in FAMILIES[model_type].attention_kinds:
        raise ConfigError(
            f'data.attention = "document": transformers does not support it for {model_type}; set "across"'
        )
    return True


@dataclass(frozen=True)
class StageEstimate:
    """One stage in the table: its layers, its parties and its needs.

    Attributes:
        layers: First and last layer, as text.
        size_bytes: Parameters in fp32.
        holder: The party that serves it first.
        shadow: The party that shadows it first, None for the owner's own.
        memory_bytes: Expected peak at the holder; `footprints` defines what is counted.
        shadow_bytes: The same at the shadow.
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
    """Return the stage table with expected memory; `workers` are the participants, all of the run's when None."""
    plan = make_plan(run, source)
    names = run.pipeline.workers if workers is None else workers
    first = first_assignment(len(plan.stages), names, guarded=run.guard.enabled)
    rows = []
    for stage, (layers, needs) in enumerate(zip(plan.stages, footprints(plan), strict=True)):
        counts = stage_counts(plan, stage)
        rows.append(
            StageEstimate(
                index=stage,
                layers=f"{layers.first_layer}-{layers.end_layer - 1}",
                parameters=counts.parameters,
                trainable=counts.trainable,
                size_bytes=counts.size_bytes,
                holder=first.holders[stage],
                shadow=first.shadows.get(stage),
                memory_bytes=needs.held,
                shadow_bytes=needs.shadowed,
            )
        )
    return rows


def describe_stages(run: RunConfig, source: ModelSource) -> RenderableType:
    """The resolved config and the stage table, for the terminal."""
    return Group(shown_config(run), stages_of(run, source))


def stages_of(run: RunConfig, source: ModelSource) -> RenderableType:
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
            _mebibytes(row.size_bytes),
            _mebibytes(row.memory_bytes),
            row.holder,
            row.shadow or "-",
        )
        for row in rows
    ]
    table = FittedTable(
        ("stage", "layers", "parameters", *trained, "size", "memory, expected", "holder", "shadow"),
        cells,
        title=f"{run.pipeline.stages} stages, {run.train.microbatches} microbatches, {run.pipeline.schedule}",
        left=("holder", "shadow"),
    )
    forked = bool(run.pipeline.workers) and not run.pipeline.remote_workers and run.train.device == "cpu"
    return Group(
        table, _memory_note(rows, forked=forked), *_party_ranks(run, rows, source), *_guard_notes(run, rows, source)
    )


def _party_ranks(run: RunConfig, rows: Sequence[StageEstimate], source: ModelSource) -> list[RenderableType]:
    """What the ranks of parties that have several need for the stages that they serve first."""
    plan = make_plan(run, source)
    shared = [row for row in rows if row.holder != OWNER and run.pipeline.layout_of(row.holder).world > 1]
    if not shared:
        return []
    cells = []
    for row in shared:
        layout = run.pipeline.layout_of(row.holder)
        needs = rank_bytes(plan, row.index, layout)
        sizes = (_mebibytes(needs.first), _mebibytes(needs.other))
        cells.append((row.holder, str(row.index), layout.label, str(layout.world), *sizes))
    table = FittedTable(
        ("party", "stage", "layout", "processes", "memory of rank 0", "of each other"),
        cells,
        title=f"{run.world['processes']} processes; parties of several ranks",
        left=("party", "layout"),
    )
    return [table]


def _guard_notes(run: RunConfig, rows: Sequence[StageEstimate], source: ModelSource) -> list[RenderableType]:
    """Return notes on the guard's findings and cost, or that it has nothing to check."""
    nobody = guarded_by_nobody(run)
    if nobody is not None:
        return [Text(nobody, style="yellow")]
    others = [row for row in rows if row.holder != OWNER]
    if not others:
        return []
    first, last = (int(row.layers.split("-")[side]) for row, side in ((others[0], 0), (others[-1], 1)))
    expected = outlook(run, (last - first + 1) / (source.num_layers + sum(estimate_costs(source.hub_config))))
    if expected is None:
        return []
    lines = outlook_rows(expected[0])
    table = FittedTable(
        tuple(lines[0]),
        [tuple(line.values()) for line in lines],
        title="one worker's stage that lies in every step",
        left=tuple(lines[0]),
    )
    return [table, price_note(run.guard, expected[1])]


def memory_by_party(rows: Sequence[StageEstimate]) -> dict[str, int]:
    """Return the expected memory of each process in bytes: its stages, its shadows, and its own needs."""
    totals: dict[str, int] = {}
    for row in rows:
        for name in (row.holder, row.shadow):
            if name is not None:
                totals.setdefault(name, _OWNER_BYTES if name == OWNER else WORKER_BYTES)
        totals[row.holder] += row.memory_bytes
        if row.shadow is not None:
            totals[row.shadow] += row.shadow_bytes
    return totals


def _memory_note(rows: Sequence[StageEstimate], *, forked: bool) -> str:
    parts = ", ".join(f"{name} {_mebibytes(size)}" for name, size in sorted(memory_by_party(rows).items()))
    shared = f"; forked on this machine (Linux), they share about {_mebibytes(_SHARED_BYTES)} of it" if forked else ""
    return f"expected memory with interpreter, libraries and transport buffers: {parts}{shared}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
