"""A table's trainings: the start of each, and the key under which its result is kept."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from phalanx.data import Corpus, DataConfig, prepare_corpus, unigram_perplexity
from phalanx.lab.bench.measure.row_file import RowFile
from phalanx.lab.reproduce.cell import Row, TableCell, train_cell
from phalanx.lab.reproduce.pretrain import Say, pretrained_directory
from phalanx.lab.reproduce.texts import SPLIT_SEED, domain_data, pretraining_corpus
from phalanx.lab.reproduce.workload import (
    PACKAGED,
    PACKAGED_MODEL,
    REGIMES,
    TableSize,
    describe_table_size,
    make_table_run,
    steps_per_epoch,
)
from phalanx.models import ModelConfig, open_model

PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""


def open_table_rows(
    path: Path, size: TableSize, holds: Callable[[TableCell, Row], bool] = lambda cell, row: True
) -> RowFile[TableCell]:
    """Trainings that are finished at this size with this protocol; `holds` as `RowFile` takes it."""
    return RowFile(
        path, lambda cell: [PROTOCOL, describe_table_size(size.for_family(cell.family)), asdict(cell)], holds
    )


class TableTrainer:
    """A trainer of cells; corpora and pre-trained models are made at their first use and kept in the cache."""

    def __init__(self, size: TableSize, cache: Path, say: Say, home: Path | None = None) -> None:
        self._size = size
        self._cache = cache
        self._say = say
        self._home = home
        self._pretraining: Corpus | None = None
        self._domains: dict[tuple[str, str, bool], tuple[DataConfig, Corpus]] = {}

    def __call__(self, cell: TableCell) -> Row:
        """Train one cell."""
        regime, size = REGIMES[cell.regime], self._size.for_family(cell.family)
        model = self._open_model(cell.family, size)
        data, corpus = self._open_domain(cell)
        steps = (size.epochs or regime.epochs) * steps_per_epoch(corpus, size.batch_size)
        run = make_table_run(model, data, regime, size, steps, cell.seed)
        row = train_cell(cell, run, corpus, self._cache)
        # the packaged model's vocabulary has more tokens than there is text to count here
        unigram = None if cell.family == PACKAGED else unigram_perplexity(corpus, self._text_a())
        return row | {
            "perplexity_unigram": unigram,
            "corpus_digest": corpus.digest,
            "model": model.name or Path(model.path or "").name,
        }

    def has_same_text(self, cell: TableCell, row: Row) -> bool:
        """Whether a row was trained on the text that the cell would be trained on now."""
        _, corpus = self._open_domain(cell)
        return bool(row["corpus_digest"] == corpus.digest)

    def _open_model(self, family: str, size: TableSize) -> ModelConfig:
        if family == PACKAGED:
            return PACKAGED_MODEL
        return ModelConfig(path=str(pretrained_directory(family, self._text_a(), size, self._cache, self._say)))

    def _text_a(self) -> Corpus:
        if self._pretraining is None:
            self._say("preparing text")
            self._pretraining = pretraining_corpus(self._cache, self._size, self._home)
        return self._pretraining

    def _open_domain(self, cell: TableCell) -> tuple[DataConfig, Corpus]:
        is_packaged = cell.family == PACKAGED
        key = cell.domain, cell.regime, is_packaged
        if key not in self._domains:
            packaged = open_model(PACKAGED_MODEL, self._cache / "models", 0) if is_packaged else None
            tokenizer = self._text_a().tokenizer_path if packaged is None else packaged.directory / "tokenizer.json"
            size = self._size.for_family(cell.family)
            data = domain_data(cell.domain, REGIMES[cell.regime], size, tokenizer, self._cache, self._home)
            self._domains[key] = (data, prepare_corpus(data, self._cache / "data", SPLIT_SEED))
        return self._domains[key]


def describe_training(place: str, cell: TableCell, row: Row) -> str:
    """One line for the progress."""
    best, last = row["perplexity_best"], row["perplexity_last"]
    shown = " / ".join("-" if value is None else f"{value:.1f}" for value in (best, last))
    return f"{place}: {cell.cell_label}: perplexity {shown} (best / last), {row['wall_s']:.0f} s"
