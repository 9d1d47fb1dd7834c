"""Rows of a run as a person looks at them before training, whatever its objective learns from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from phalanx.data import prepare
from phalanx.data.preferences import PairCorpus, prepare_preferences
from phalanx.data.preferences.pairs import MARGIN
from phalanx.data.prompts import PromptSet, prepare_prompts
from phalanx.data.row_text import RowPiece, pieces_of, row_pieces
from phalanx.errors import ConfigError
from phalanx.models import open_model
from phalanx.objectives import OBJECTIVES
from phalanx.objectives.kto import WANTED
from phalanx.train.batches.rollouts import settings_of
from phalanx.train.config import RunConfig

Shown = Sequence[tuple[Mapping[str, Any], list[RowPiece]]]


@dataclass(frozen=True)
class ShownRows:
    """The training rows of a run.

    Attributes:
        count: How many numbers there are.
        show: Returns the rows of a number, each with its pieces and what stands beside its tokens.
    """

    count: int
    show: Callable[[int], Shown]


def shown_rows(run: RunConfig, cache: Path) -> ShownRows:
    """Prepare the training rows of a run, if they are not there yet.

    Raises:
        ConfigError: Its rows are with the clients of a split.
        DataError: The text cannot be had.
        ModelError: The model cannot be read.
    """
    if run.data.labelled is not None:
        raise ConfigError("data.labelled: its rows are the clients' own; rows of every other kind are shown")
    source = open_model(run.model, cache / "models", run.train.seed)
    where, seed, path = cache / "data", run.train.seed, source.tokenizer_path
    if run.data.preferences is not None:
        single = WANTED in OBJECTIVES[run.train.objective_kind].extras
        pairs = prepare_preferences(run.data, where, seed, path, lambda _: None, single=single)
        return ShownRows(pairs.num_train_sequences, lambda number: _pair(pairs, number, single=single))
    if run.data.prompts:
        prompts = prepare_prompts(run.data, where, seed, path, settings_of(run).max_new_tokens)
        return ShownRows(prompts.num_train_sequences, lambda number: _prompt(prompts, number))
    corpus = prepare(run.data, where, seed, path)
    return ShownRows(corpus.num_train_sequences, lambda number: [({}, row_pieces(corpus, number))])


def _prompt(prompts: PromptSet, number: int) -> Shown:
    """Nothing of a prompt is learned: the model writes what follows it."""
    ids = prompts.train[number].ids
    return [({}, pieces_of(ids, [False] * len(ids), prompts.tokenizer.backend))]


def _pair(pairs: PairCorpus, number: int, *, single: bool) -> Shown:
    batch = pairs.train_batch([number])
    backend = tokenizers.Tokenizer.from_file(str(pairs.tokenizer_path))
    shown = []
    for side, name in enumerate(("example", "companion") if single else ("chosen", "rejected")):
        labels: list[int] = batch.labels[side].tolist()
        learned = [False, *(label >= 0 for label in labels[:-1])]
        end = max((at for at, is_learned in enumerate(learned) if is_learned), default=len(learned) - 1) + 1
        about: dict[str, Any] = {"side": name}
        if single:
            about["wanted"] = bool(batch.extras[WANTED][side])
        elif float(batch.extras[MARGIN][side]):
            about["margin"] = float(batch.extras[MARGIN][side])
        shown.append((about, pieces_of(batch.input_ids[side].tolist()[:end], learned[:end], backend)))
    return shown
