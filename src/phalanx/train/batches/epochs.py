"""The length of a run in steps, where the run file gives passes over the data."""

import math
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from phalanx.data import prepare_corpus
from phalanx.data.preferences import prepare_preferences
from phalanx.models import open_model
from phalanx.objectives import OBJECTIVES
from phalanx.objectives.kto import WANTED
from phalanx.train.batches.labelled import prepare_labelled
from phalanx.train.config import RunConfig
from phalanx.train.runs.base import BaseRun

RunT = TypeVar("RunT", bound=BaseRun)


def settle_steps(run: RunT, cache: Path) -> RunT:
    """Return the run with the steps that its epochs come to on the data that is here; any other run as it is.

    The last step's batch is full: it goes on with the next pass, as any batch at the end of a pass does.

    Args:
        cache: Directory of prepared text and models; missing text is prepared here.

    Raises:
        ConfigError: So many steps do not fit the rest of the run file.
    """
    epochs = run.train.epochs
    if epochs is None:
        return run
    # as it is written: three times a third is one
    samples = Fraction(repr(epochs)) * num_sequences(run, cache)
    return run.of_length(max(1, math.ceil(samples / run.train.draws_per_step)))


def num_sequences(run: BaseRun, cache: Path) -> int:
    """Return the number of a run's training sequences; for labelled texts, of all clients together.

    Raises:
        ConfigError: They are with remote clients, and not here to be counted.
    """
    source = open_model(run.model, cache / "models", run.train.seed)
    if run.data.preferences is not None:
        single = WANTED in OBJECTIVES[run.train.objective_kind].extras
        path, directory = source.tokenizer_path, cache / "data"
        return prepare_preferences(
            run.data, directory, run.train.seed, path, lambda _: None, single=single
        ).num_train_sequences
    labelled = run.data.labelled
    if labelled is None or not run.text_parties:
        return prepare_corpus(run.data, cache / "data", run.train.seed, source.tokenizer_path).num_train_sequences
    if labelled.own_task is not None and not labelled.own_task.train:
        run.require_steps("an owner of remote clients")
    texts = prepare_labelled(run.data, run.text_parties, run.train.seed, source.tokenizer_path)
    return sum(client_texts.num_train_sequences for client_texts in texts.clients.values())


def describe_length(before: RunConfig, after: RunConfig) -> str | None:
    """Describe how many steps the configured epochs are; None where the run file gives steps."""
    if before.train.epochs is None:
        return None
    return f"{before.train.epochs:g} epochs of this data are {after.train.steps} steps"
