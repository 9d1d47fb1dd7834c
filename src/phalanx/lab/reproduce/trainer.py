"""A table's trainings: the start of each, and the key under which its result is kept."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from phalanx.data import Corpus, DataConfig, prepare_corpus
from phalanx.lab.bench.measure.row_file import RowFile
from phalanx.lab.reproduce.cell import Row, TableCell, train_cell
from phalanx.lab.reproduce.pretrain import Say, pretrained_directory
from phalanx.lab.reproduce.texts import SPLIT_SEED, domain_data, pretraining_corpus
from phalanx.lab.reproduce.workload import REGIMES, TableSize, describe_table_size, make_table_run, steps_per_epoch

PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""


def open_table_rows(
    path: Path, size: TableSize, holds: Callable[[TableCell, Row], bool] = lambda cell, row: True
) -> RowFile[TableCell]:
    """Trainings that are finished at this size with this protocol; `holds` as `RowFile` takes it."""
    return RowFile(path, lambda cell: [PROTOCOL, describe_table_size(size), asdict(cell)], holds)


class TableTrainer:
    """A trainer of cells; corpora and pre-trained models are made at their first use and kept in the cache."""

    def __init__(self, size: TableSize, cache: Path, say: Say) -> None:
        self._size = size
        self._cache = cache
        self._say = say
        self._pretraining: Corpus | None = None
        self._domains: dict[tuple[str, str], tuple[DataConfig, Corpus]] = {}

    def __call__(self, cell: TableCell) -> Row:
        """Train one cell."""
        regime = REGIMES[cell.regime]
        model = pretrained_directory(cell.family, self._text_a(), self._size, self._cache, self._say)
        data, corpus = self._open_domain(cell.domain, cell.regime)
        run = make_table_run(model, data, regime, self._size, regime.epochs * steps_per_epoch(corpus), cell.seed)
        return train_cell(cell, run, corpus, self._cache) | {"corpus_digest": corpus.digest, "model": model.name}

    def has_same_text(self, cell: TableCell, row: Row) -> bool:
        """Whether a row was trained on the text that the cell would be trained on now."""
        _, corpus = self._open_domain(cell.domain, cell.regime)
        return bool(row["corpus_digest"] == corpus.digest)

    def _text_a(self) -> Corpus:
        if self._pretraining is None:
            self._say("preparing text")
            self._pretraining = pretraining_corpus(self._cache, self._size)
        return self._pretraining

    def _open_domain(self, domain: str, regime: str) -> tuple[DataConfig, Corpus]:
        if (domain, regime) not in self._domains:
            tokenizer = self._text_a().tokenizer_path
            data = domain_data(domain, REGIMES[regime], self._size, tokenizer, self._cache)
            self._domains[domain, regime] = (data, prepare_corpus(data, self._cache / "data", SPLIT_SEED))
        return self._domains[domain, regime]


def describe_training(place: str, cell: TableCell, row: Row) -> str:
    """One line for the progress."""
    best, last = row["perplexity_best"], row["perplexity_last"]
    shown = " / ".join("-" if value is None else f"{value:.1f}" for value in (best, last))
    return f"{place}: {cell.cell_label}: perplexity {shown} (best / last), {row['wall_s']:.0f} s"
