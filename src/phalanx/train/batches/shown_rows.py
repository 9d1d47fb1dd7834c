"""Rows of a run as a person looks at them before training, whatever its objective learns from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from phalanx.data import IGNORE, prepare_corpus
from phalanx.data.preferences import PairCorpus, prepare_preferences
from phalanx.data.preferences.pairs import MARGIN
from phalanx.data.prompts import PromptSet, prepare_prompts
from phalanx.data.row_text import RowPiece, pieces_of, row_pieces
from phalanx.errors import ConfigError
from phalanx.models import open_model
from phalanx.objectives import OBJECTIVES, objective_of
from phalanx.objectives.kto import WANTED
from phalanx.train.batches.labelled import prepare_labelled
from phalanx.train.batches.rewriting import rewriting_of
from phalanx.train.batches.rollouts import settings_of
from phalanx.train.config import RunConfig

Shown = Sequence[tuple[Mapping[str, Any], list[RowPiece]]]


@dataclass(frozen=True)
class ShownRows:
    """The training rows of a run.

    Attributes:
        show: Returns the rows of a number, each with its pieces and what stands beside its tokens.
    """

    count: int
    show: Callable[[int], Shown]


def shown_rows(run: RunConfig, cache: Path) -> ShownRows:
    """Prepare the training rows of a run, if they are not there yet."""
    source = open_model(run.model, cache / "models", run.train.seed)
    directory, seed, path = cache / "data", run.train.seed, source.tokenizer_path
    if run.data.labelled is not None:
        return _labelled_rows(run, path)
    if run.data.preferences is not None:
        single = WANTED in OBJECTIVES[run.train.objective_kind].extras
        pairs = prepare_preferences(run.data, directory, seed, path, lambda _: None, single=single)
        return ShownRows(pairs.num_train_sequences, lambda number: _show_pair(pairs, number, single=single))
    if run.data.prompts:
        prompts = prepare_prompts(run.data, directory, seed, path, settings_of(run).max_new_tokens)
        return ShownRows(prompts.num_train_sequences, lambda number: _show_prompt(prompts, number))
    corpus = prepare_corpus(run.data, directory, seed, path)
    rewriting = rewriting_of(run, corpus)
    in_place = objective_of(run.train.objective).attention == "bidirectional"

    def show(number: int) -> Shown:
        batch = corpus.train_batch([number])
        made = batch if rewriting is None else rewriting(batch, [number], [0])
        return [({}, row_pieces(made, corpus, in_place=in_place))]

    return ShownRows(corpus.num_train_sequences, show)


def _labelled_rows(run: RunConfig, tokenizer_path: Path | None) -> ShownRows:
    """Return the training texts of all clients or sites, each with its class."""
    labelled = run.data.labelled
    if labelled is not None and labelled.own_task is not None and not labelled.own_task.train:
        raise ConfigError("data.labelled: its rows are on the machines of remote clients; use the run file of a client")
    texts = prepare_labelled(run.data, run.text_parties, run.train.seed, tokenizer_path)
    places = [(name, at) for name, one in texts.clients.items() for at in range(one.num_train_sequences)]

    def show(number: int) -> Shown:
        name, at = places[number]
        batch = texts.clients[name].train_batch([at])
        # a text ends where its class stands, and its words are read and not learned
        end = int((batch.labels[0] != IGNORE).nonzero()[-1]) + 1
        ids: list[int] = batch.input_ids[0, :end].tolist()
        about = {"party": name, "class": texts.classes[int(batch.labels[0, end - 1])]}
        return [(about, pieces_of(ids, [False] * end, texts.tokenizer.backend))]

    return ShownRows(len(places), show)


def _show_prompt(prompts: PromptSet, number: int) -> Shown:
    """Nothing of a prompt is learned: the model writes what follows it."""
    ids = prompts.train[number].ids
    return [({}, pieces_of(ids, [False] * len(ids), prompts.tokenizer.backend))]


def _show_pair(pairs: PairCorpus, number: int, *, single: bool) -> Shown:
    batch = pairs.train_batch([number])
    backend = tokenizers.Tokenizer.from_file(str(pairs.tokenizer_path))
    shown = []
    for side, name in enumerate(("example", "companion") if single else ("chosen", "rejected")):
        labels: list[int] = batch.labels[side].tolist()
        learned = [False, *(label >= 0 for label in labels[:-1])]
        end_index = max((index for index, is_learned in enumerate(learned) if is_learned), default=len(learned) - 1) + 1
        description: dict[str, Any] = {"side": name}
        if single:
            description["wanted"] = bool(batch.extras[WANTED][side])
        elif float(batch.extras[MARGIN][side]):
            description["margin"] = float(batch.extras[MARGIN][side])
        shown.append((description, pieces_of(batch.input_ids[side].tolist()[:end_index], learned[:end_index], backend)))
    return shown
