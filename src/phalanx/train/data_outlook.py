"""The data at hand before a run begins: tokens, epochs and held-out rows; the time and the disk that the run takes."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from phalanx.data import prepare_corpus
from phalanx.data.order.run_order import PhaseCount
from phalanx.data.preferences import prepare_preferences
from phalanx.models import ModelSource, StageSpec, stage_table
from phalanx.models.build import StageRow
from phalanx.objectives import OBJECTIVES
from phalanx.objectives.kto import WANTED
from phalanx.pipeline.processes.own_speed import own_gflops
from phalanx.planner.guard.price_law import StepSize
from phalanx.telemetry.parties import size_in_words
from phalanx.train.batches.labelled import prepare_labelled
from phalanx.train.config import RunConfig, StagedRun
from phalanx.train.runs.mixed import MixedBase
from phalanx.train.setup.guard_outlook import predict_guard

_MAX_BYTES = 256 << 20
"""Of the files of a run's sources: more text is not prepared for a look at it."""
_BYTES_PER_TOKEN = 4
_STATE_BYTES = 12
"""Of a trained number: its value and two moments."""
_JOURNAL_STATES = 2
_SLOWDOWN = (2.0, 8.0)
"""How many times longer training takes than its matrix products alone, at the speed of one large product."""


@dataclass(frozen=True)
class DataCounts:
    """The rows of a run's data: sequences, pairs, or labelled texts.

    Attributes:
        is_estimate: Whether they are no count: of large files they follow from the size.
        phases: What each phase draws; empty where all draw from all sequences.
    """

    unit: str
    train: int
    held_out: int
    is_estimate: bool = False
    phases: tuple[PhaseCount, ...] = ()


def data_outlook(run: RunConfig, source: ModelSource, cache: Path) -> Text:
    """Describe the data at hand: tokens, epochs and held-out rows; and the time and the disk that a run takes."""
    batches = run.train.steps * run.batches_a_step
    tokens = batches * run.train.batch_size * run.data.sequence_length
    lines = [f"training: {run.train.steps:,} steps, at most {tokens:,} tokens"]
    if isinstance(run, MixedBase) and run.objectives:
        shares = run.objective_shares
        lines += [f'objective "{one.name}": {one.rows} rows a step, weight {one.weight:g}' for one in shares]
    counts = count_rows(run, source, cache)
    if counts is None:
        lines.append("data: not available here")
    else:
        about = "about " if counts.is_estimate else ""
        passes = batches * run.main_draws / max(1, counts.train)
        each = 2 if counts.unit == "pairs" else 1
        most = each * counts.train * run.data.sequence_length
        lines.append(
            f"data: {about}{counts.train:,} {counts.unit} to train on (at most {most:,} tokens), so {passes:.3g} "
            f"epochs; {about}{counts.held_out:,} held out"
        )
        lines += [
            f"phase {number}: {one.num_samples:,} samples from {one.num_sequences:,} sequences ({one.amount:.3g} of "
            f"them), so {one.num_samples / one.num_sequences:.3g} epochs"
            for number, one in enumerate(counts.phases)
        ]
    row = stage_table(source.hub_config, (StageSpec(0, 1, 0, source.num_layers),), run.model.adapter)[0]
    return Text(
        "\n".join([*lines, _estimate_time(run, row, tokens, source.hub_config.hidden_size), _estimate_disk(run, row)])
    )


def count_rows(run: RunConfig, source: ModelSource, cache: Path) -> DataCounts | None:
    """Count the rows of a run's data; None where they are elsewhere, or are written by the model."""
    data, seed, vocabulary = run.data, run.train.seed, source.tokenizer_path
    if data.prompts or (
        data.labelled is not None and data.labelled.own_task is not None and not data.labelled.own_task.train
    ):
        return None
    if any(files is not None and not files.sources for files in (data.conversations, data.preferences)):
        return None
    if data.preferences is not None:
        single = WANTED in OBJECTIVES[run.train.objective_kind].extras
        pairs = prepare_preferences(data, cache / "data", seed, vocabulary, lambda _: None, single=single)
        return DataCounts("pairs", pairs.num_train_sequences, pairs.num_validation_sequences)
    if data.labelled is not None:
        texts = prepare_labelled(data, run.text_parties, seed, vocabulary)
        trained = sum(one.num_train_sequences for one in texts.clients.values())
        return DataCounts("texts", trained, texts.num_validation_sequences)
    size_bytes = _bytes_of_sources(run)
    if size_bytes > _MAX_BYTES:
        rows = size_bytes // (_BYTES_PER_TOKEN * data.sequence_length)
        held_out = min(round(rows * data.validation_share), data.max_validation_sequences)
        return DataCounts("sequences", rows - round(rows * data.validation_share), held_out, is_estimate=True)
    corpus = prepare_corpus(data, cache / "data", seed, vocabulary)
    phases: tuple[PhaseCount, ...] = ()
    if any(phase.amount < 1 for phase in data.phases):
        order = corpus.sample_order(seed, run.main_draws)
        phases = tuple(order.count_phases(run.train.steps * run.batches_a_step * run.main_draws))
    held_out = corpus.num_validation_sequences
    return DataCounts("sequences", corpus.num_train_sequences, held_out, phases=phases)


def _bytes_of_sources(run: RunConfig) -> int:
    talks = () if run.data.conversations is None else run.data.conversations.sources
    paths = [getattr(one, "path", None) for one in (*run.data.sources, *talks)]
    files = [path.rglob("*") if path.is_dir() else (path,) for path in paths if isinstance(path, Path)]
    return sum(file.lstat().st_size for group in files for file in group if file.is_file())


def _estimate_time(run: RunConfig, row: StageRow, tokens: int, width: int) -> str:
    """Estimate the time on this machine by its speed at one matrix product; of other machines nothing is known."""
    if run.pki is not None or run.train.device != "cpu":
        return "time: unknown until the first steps have shown the speed of the machines"
    price = None
    if isinstance(run, StagedRun) and run.guard.is_enabled:
        size = StepSize.of_equal_stages(
            row.parameters,
            width,
            run.train.batch_size * run.data.sequence_length,
            stages=run.pipeline.stages,
            microbatches=run.train.microbatches,
        )
        price = None if size is None else predict_guard(run, size)
    work = 6 * row.parameters * tokens * (1 + (0.0 if price is None else price[1].extra_compute))
    at_once = max(1, min(run.world["processes"], len(os.sched_getaffinity(0))))
    seconds = work / (own_gflops() * 1e9) / at_once
    least, most = (_format_duration(times * seconds) for times in _SLOWDOWN)
    return (
        f"time: about {least} to {most} on {at_once} cores of this machine at its present load, without the "
        "preparation of text"
    )


def _estimate_disk(run: RunConfig, row: StageRow) -> str:
    """Estimate the bytes that a run writes: checkpoints, and while it runs the journal and states to go back to."""
    state = _STATE_BYTES * row.trainable
    every = run.checkpoint.every or run.train.steps
    written = max(1, math.ceil(run.train.steps / every))
    kept = min(written, run.checkpoint.keep)
    if run.checkpoint.keep_every:
        kept += run.train.steps // run.checkpoint.keep_every
    parts = [f"{size_in_words(kept * state)} of checkpoints"]
    if run.journals:
        parts.append(f"{size_in_words(_JOURNAL_STATES * state)} of the journal while it runs")
    guard = run.stage_guard
    if guard is not None and guard.is_enabled and guard.keep_states:
        points = 1 + math.ceil(math.log2(1 + run.train.steps / guard.keep_states))
        parts.append(f"{size_in_words(points * state)} of saved states while it runs")
    return f"disk: {', '.join(parts)}; prepared text needs about the size of its files"


def _format_duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, math.ceil(seconds))} seconds"
