"""Many cells, one after the other; each is on disk when it is finished, so an interrupted sweep goes on."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.data import Corpus, DataConfig, prepare
from phalanx.errors import DataError
from phalanx.reproduce.cell import Cell, Row, train_cell
from phalanx.reproduce.pretrain import Say, pretrained
from phalanx.reproduce.texts import SPLIT_SEED, domain_data, pretraining_corpus
from phalanx.reproduce.workload import REGIMES, Size, describe, run_of, steps_per_epoch

PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""

TrainCell = Callable[[Cell], Row]


class RowFile:
    """Finished rows, one JSON object a line, each with a key over all that decided it."""

    def __init__(self, path: Path, size: Size) -> None:
        self.path = path
        self._size = size
        self._rows = {str(row["key"]): row for row in self._read()}

    def find(self, cell: Cell) -> Row | None:
        """The row of a cell, None where it has not been trained with this protocol and these versions."""
        return self._rows.get(self.key(cell))

    def add(self, cell: Cell, row: Row) -> Row:
        """Append a row; it is on disk when this returns.

        Raises:
            DataError: The file cannot be written.
        """
        kept = {"key": self.key(cell), **row}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept, allow_nan=False) + "\n")
        except OSError as exc:
            raise DataError(
                f"{self.path}: cannot be written ({exc.strerror}); free space or set PHALANX_CACHE"
            ) from exc
        self._rows[kept["key"]] = kept
        return kept

    def key(self, cell: Cell) -> str:
        """Digest of the cell and of everything else that decides its figures."""
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")]
        parts = [PROTOCOL, describe(self._size), asdict(cell), versions, platform.python_version()]
        return hashlib.sha256(canonical_json(parts)).hexdigest()

    def _read(self) -> Iterator[Row]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        except OSError as exc:
            raise DataError(f"{self.path}: cannot be read ({exc.strerror}); check its permissions") from exc
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as exc:
                # the last line of a sweep that was killed while it wrote
                if number == len(lines):
                    return
                raise DataError(f"{self.path}, line {number}: is not JSON ({exc}); remove the line") from exc
            yield row


class Trainer:
    """Trains cells; corpora and pre-trained models are made at their first use and kept in the cache."""

    def __init__(self, size: Size, cache: Path, say: Say) -> None:
        self._size = size
        self._cache = cache
        self._say = say
        self._pretraining: Corpus | None = None
        self._domains: dict[tuple[str, str], tuple[DataConfig, Corpus]] = {}

    def __call__(self, cell: Cell) -> Row:
        """Train one cell.

        Raises:
            PhalanxError: Text or model cannot be had, or training cannot go on.
        """
        regime = REGIMES[cell.regime]
        model = pretrained(cell.family, self._text_a(), self._size, self._cache, self._say)
        data, corpus = self._domain(cell.domain, cell.regime)
        run = run_of(model, data, regime, regime.epochs * steps_per_epoch(corpus), cell.seed)
        return train_cell(cell, run, corpus, self._cache) | {"corpus_digest": corpus.digest, "model": model.name}

    def _text_a(self) -> Corpus:
        if self._pretraining is None:
            self._say("preparing text")
            self._pretraining = pretraining_corpus(self._cache, self._size)
        return self._pretraining

    def _domain(self, domain: str, regime: str) -> tuple[DataConfig, Corpus]:
        if (domain, regime) not in self._domains:
            tokenizer = self._text_a().tokenizer_path
            data = domain_data(domain, REGIMES[regime], self._size, tokenizer, self._cache)
            self._domains[domain, regime] = (data, prepare(data, self._cache / "data", SPLIT_SEED))
        return self._domains[domain, regime]


def sweep(cells: Iterable[Cell], rows: RowFile, train: TrainCell | None, say: Say) -> Iterator[Row]:
    """The rows of these cells, in order; those that are not there are trained.

    Args:
        cells: What the table needs.
        rows: What is there.
        train: None leaves out what is not there.
        say: Told one line a cell.
    """
    wanted = list(cells)
    for number, cell in enumerate(wanted, start=1):
        found = rows.find(cell)
        if found is None and train is not None:
            found = rows.add(cell, train(cell))
            say(f"{number} of {len(wanted)}: {cell.label}: {_result(found)}")
        if found is not None:
            yield found


def _result(row: Row) -> str:
    best, last = row["perplexity_best"], row["perplexity_last"]
    shown = " / ".join("-" if value is None else f"{value:.1f}" for value in (best, last))
    return f"perplexity {shown} (best / last), {row['wall_s']:.0f} s"
