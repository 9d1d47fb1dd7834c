"""One trial: an ordinary run directory, and the loss that its owner finds in its verified checkpoint."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import psutil
from rich.console import Console

from phalanx.config import digest_config
from phalanx.data import prepare_corpus, validation_batches
from phalanx.data.config import HELD_OUT
from phalanx.data.validation_sets import prepare_validation_sets
from phalanx.errors import CheckpointError
from phalanx.models import ModelConfig, StageSpec, build_stage, open_model
from phalanx.sweep.config import TrialRun
from phalanx.train import PastRun, check_inputs, export_run, holds_run, train
from phalanx.train.batches.rewriting import rewrite_held_out, rewriting_of
from phalanx.train.batches.validation import summed_losses
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.sessions.hooks import VALIDATION_BATCH, OnValidation
from phalanx.train.setup.planned_memory import planned_bytes

MIB = 2**20


class Trials(Protocol):
    """What trains trials and measures them."""

    def find_excess(self, run: TrialRun, max_memory_mib: int | None) -> str | None:
        """Say why a trial does not fit into memory; None where it does."""

    def train_trial(self, run: TrialRun, directory: Path, on_validation: OnValidation) -> str:
        """Train a trial, or go on with it; return the status of its summary."""

    def measure_loss(self, run: TrialRun, directory: Path, on: str) -> float:
        """Measure the trained model on a validation set, in nats a token."""

    def end_trials(self) -> None:
        """End trials that other threads are training."""


class RunTrials:
    """Trials that are trained here, one after the other.

    Args:
        open_log: Opens the console for the lines of a trial's run, by the trial's directory.

    Guarantees:
        A loss is computed by this process alone, from the newest checkpoint that the run's signed log certifies, with
        weights that are written out anew. What summary, metrics and events of the trial say does not enter. A directory
        with another run file than the trial's is refused.

    Does not find a trial that was trained on the text that it is measured on, or was lucky there: trials are trained
    again for that, with other seeds and, where the sweep file names it, other text.
    """

    def __init__(self, open_log: Callable[[Path], AbstractContextManager[Console]]) -> None:
        self._open_log = open_log

    def find_excess(self, run: TrialRun, max_memory_mib: int | None) -> str | None:
        """Say why a trial does not fit into memory, by the planner's estimate.

        Raises:
            ConfigError: The run cannot be trained at all, as far as that is seen before it.
        """
        check_inputs(run)
        limit = psutil.virtual_memory().total if max_memory_mib is None else max_memory_mib * MIB
        needed = planned_bytes(run)
        if needed <= limit:
            return None
        return f"needs {needed / MIB:,.0f} MiB by the planner's estimate, allowed are {limit / MIB:,.0f} MiB"

    def train_trial(self, run: TrialRun, directory: Path, on_validation: OnValidation) -> str:
        """Train a trial, or go on with it."""
        with self._open_log(directory) as console:
            summary = train(run, directory, resume=holds_run(directory), console=console, on_validation=on_validation)
        return str(summary["status"])

    def measure_loss(self, run: TrialRun, directory: Path, on: str) -> float:
        """Measure the newest certified checkpoint.

        Raises:
            CheckpointError: It is not one of this trial's run, or has not all of its steps.
        """
        past = PastRun(directory)
        if digest_config(past.config) != digest_config(run):
            raise CheckpointError(f"{directory}: has another run file than the trial; remove the directory")
        source = open_model(run.model, cache_beside(directory) / "models", run.train.seed)
        cache = cache_beside(directory) / "data"
        corpus = prepare_corpus(run.data, cache, run.train.seed, source.tokenizer_path)
        named_sets = prepare_validation_sets(run.data, corpus, cache, source.tokenizer_path)
        rows = rewrite_held_out(corpus if on == HELD_OUT else named_sets[on], rewriting_of(run, corpus))
        with tempfile.TemporaryDirectory(prefix="phalanx-trial-") as spare:
            out = Path(spare) / "model"
            step = export_run(past, out, merge=True)
            if step != run.train.steps:
                raise CheckpointError(f"{directory}: its newest checkpoint is of step {step} of {run.train.steps}")
            trained = open_model(ModelConfig(path=str(out)), Path(spare), run.train.seed)
            stage_spec = StageSpec(0, 1, 0, trained.num_layers)
            stage = build_stage(
                trained, stage_spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=run.train.seed
            )
            total, count = summed_losses([stage], [validation_batches(rows, VALIDATION_BATCH)])[0]
        return total / count

    def end_trials(self) -> None:
        """There are none: this process trains one at a time."""
