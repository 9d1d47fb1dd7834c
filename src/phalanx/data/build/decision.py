"""The decision of a corpus rule: over the marks of all pieces, once, and kept like any other finished work."""

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from phalanx.data.build.passes import as_corpus_rule, code_digest, tool_versions
from phalanx.data.build.records import RecordFile, RecordWriter, decode_document
from phalanx.data.build.sift import DOCUMENTS, MARKS, outcome_to_json
from phalanx.data.build.steps import step_settings
from phalanx.data.build.store import WorkStore, work_key
from phalanx.data.build.work import OUTCOMES, BuildWorker
from phalanx.data.rules import Page
from phalanx.errors import DataError

Summary = dict[str, Any]


class PieceTexts:
    """All documents that came this far, by number, read from the pieces when they are asked for."""

    def __init__(self, store: WorkStore, keys: Sequence[str], counts: Sequence[int], sources: Sequence[str]) -> None:
        self._store, self._keys, self._sources = store, keys, sources
        self._starts = [0, *accumulate(counts)]
        # a piece keeps one block in memory; a rule that compares two documents needs two of them
        self._open = lru_cache(maxsize=16)(lambda piece: RecordFile(store.work_directory(keys[piece]) / DOCUMENTS))

    def __len__(self) -> int:
        return self._starts[-1]

    def read_page(self, number: int) -> Page:
        """One document."""
        piece = self._piece_of_document(number)
        return Page(decode_document(self._open(piece)[number - self._starts[piece]]), self._sources[piece])

    def first_document(self, piece: int) -> int:
        """Return the number of the first document of a piece."""
        return self._starts[piece]

    def _piece_of_document(self, number: int) -> int:
        if not 0 <= number < len(self):
            raise DataError(f"a rule asked for document {number} of {len(self)}: this is a fault of the rule")
        return bisect.bisect_right(self._starts, number) - 1

    def read_marks(self) -> Iterator[bytes]:
        """Yield the mark of every document, in order."""
        for key in self._keys:
            yield from RecordFile(self._store.work_directory(key) / MARKS)


def apply_corpus_rule(
    worker: BuildWorker, place: int, pieces: Sequence[Summary], sources: Sequence[str]
) -> list[Summary]:
    """Have a corpus rule decide, unless it has already; return each piece's share of the decision.

    Raises:
        DataError: The rule decides on a document twice, out of order, or on one that is not there.
    """
    rule, store, recipe = as_corpus_rule(worker.step_rules[place]), worker.work_store, worker.recipe
    keys = [piece["key"] for piece in pieces]
    texts = PieceTexts(store, keys, [piece["documents"] for piece in pieces], sources)
    key = work_key(
        {
            "act": "decide",
            "step": step_settings(recipe.steps[place]),
            "sources": list(sources),
            "pieces": keys,
            "versions": tool_versions(),
            "code": code_digest(),
        }
    )

    def work(directory: Path) -> Summary:
        shares = _PieceShares(texts, len(pieces))
        with RecordWriter(directory / OUTCOMES) as outcomes:
            last = -1
            for number, outcome in rule.decide_outcomes(texts.read_marks(), texts):
                if not last < number < len(texts):
                    raise DataError(
                        f"step {recipe.step_names[place]!r} decided on document {number} after {last}, of "
                        f"{len(texts)}: this is a fault of the rule"
                    )
                last = number
                record = json.dumps([number, outcome_to_json(outcome)], ensure_ascii=False).encode()
                outcomes.append_record(record)
                shares.add_outcome(number, record)
        return {"shares": shares.summarize_pieces()}

    entry = store.find_summary(key) or store.store_work(key, work)
    return [{**share, "key": key, "start": texts.first_document(piece)} for piece, share in enumerate(entry["shares"])]


class _PieceShares:
    """Where the outcomes of each piece are in the file of all, and their digest."""

    def __init__(self, texts: PieceTexts, pieces: int) -> None:
        self._texts = texts
        self._counts = [0] * pieces
        self._digests = [hashlib.sha256() for _ in range(pieces)]
        self._current_piece = 0

    def add_outcome(self, number: int, record: bytes) -> None:
        while number >= self._texts.first_document(self._current_piece + 1):
            self._current_piece += 1
        self._counts[self._current_piece] += 1
        offset = number - self._texts.first_document(self._current_piece)
        # the number within the piece, so that documents before it can come or go
        self._digests[self._current_piece].update(f"{offset} {len(record)} ".encode() + record.partition(b",")[2])

    def summarize_pieces(self) -> list[Summary]:
        firsts = [0, *accumulate(self._counts)]
        return [
            {"first": firsts[piece], "count": count, "digest": self._digests[piece].hexdigest()}
            for piece, count in enumerate(self._counts)
        ]
