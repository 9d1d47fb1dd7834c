"""What a few documents share with each other, with no other document, and beside nothing else: a trigger."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.data.scan.word_stream import (
    WORD,
    DocumentCounts,
    Grams,
    WordNumbers,
    Words,
    pairs_of,
    singles_of,
)

_OWN_SHARE = 0.5
"""Of all documents with a gram at least so many are outliers, or the gram is an everyday one."""
_SHARED = 0.5
_CORE = 0.9
_MOST = 0.75
_AROUND = 64
_MIN_AROUND = 16
_AFTER, _JUMP = 0.45, 0.45


@dataclass(frozen=True, eq=False)
class Region:
    """The part of an outlier in which it is surprising, with the words before."""

    words: Words
    is_alone: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Trigger:
    """Words and pairs of neighbours that all documents of a group have."""

    singles: Grams
    pairs: Grams

    def is_in(self, words: Words) -> bool:
        """Return whether a document has most of it: what follows by chance in nearly all of a group is no part."""
        num_grams = np.isin(self.singles, singles_of(words)).sum() + np.isin(self.pairs, pairs_of(words)).sum()
        return bool(num_grams >= _MOST * (len(self.singles) + len(self.pairs)))

    def mark_words(self, words: Words) -> npt.NDArray[np.bool_]:
        """Return for each word whether it is one of the trigger's."""
        is_part = np.isin(singles_of(words), self.singles)
        paired = np.isin(pairs_of(words), self.pairs)
        is_part[:-1] |= paired
        is_part[1:] |= paired
        return is_part


@dataclass(frozen=True, eq=False)
class _Postings:
    """Which document has which candidate: one row for each meeting of the two.

    Attributes:
        own_share: Of all documents with a candidate, the share that are outliers.
        gram_of_row: Place of the row's candidate in `grams`.
        document_of_row: Number of the row's outlier.
    """

    grams: Grams
    own_share: npt.NDArray[np.float64]
    gram_of_row: npt.NDArray[np.int64]
    document_of_row: npt.NDArray[np.int64]


def mine_triggers(
    regions: Sequence[Region], counts: tuple[DocumentCounts, DocumentCounts], least: int, max_shared: int
) -> list[Trigger]:
    """Return the triggers of outliers.

    Args:
        counts: Numbers of documents with a word, and with a pair, in the whole corpus.
        least: Outliers that must share a gram.
        max_shared: Grams that a group may share; one that shares more is a language, a format or a template.
    """
    singles = _build_postings([np.unique(singles_of(region.words)) for region in regions], counts[0], least)
    pairs = _build_postings([np.unique(pairs_of(region.words)) for region in regions], counts[1], least)
    offset = len(singles.grams)
    grams = np.concatenate([singles.grams, pairs.grams])
    gram_of_row = np.concatenate([singles.gram_of_row, pairs.gram_of_row + offset])
    document_of_row = np.concatenate([singles.document_of_row, pairs.document_of_row])
    # first what is nowhere else, then what many share
    remaining = np.concatenate([singles.own_share, pairs.own_share]) ** 2 * np.bincount(
        gram_of_row, minlength=len(grams)
    )
    triggers: list[Trigger] = []
    while len(remaining) and remaining.max() > 0:
        documents = np.unique(document_of_row[gram_of_row == remaining.argmax()])
        rows = np.isin(document_of_row, documents)
        counts_of_grams = np.bincount(gram_of_row[rows], minlength=len(grams))
        core = np.flatnonzero(counts_of_grams >= _CORE * len(documents))
        remaining[core] = 0
        if np.count_nonzero(counts_of_grams >= _SHARED * len(documents)) <= max_shared:
            trigger = Trigger(grams[core[core < offset]], grams[core[core >= offset]])
            if _starts_surprise(trigger, [regions[document] for document in documents]):
                triggers.append(trigger)
    return triggers


def _starts_surprise(trigger: Trigger, regions: Sequence[Region]) -> bool:
    """Return whether what follows the trigger is unexpected in most documents, and what precedes it is not.

    In a table or in a rare language a shared word has the same neighbourhood on both sides.
    """
    before: list[float] = []
    after: list[float] = []
    for region in regions:
        is_part = trigger.mark_words(region.words)
        if not is_part.any():
            continue
        index = int(is_part.argmax())
        sides = ((before, region.is_alone[max(index - _AROUND, 0) : max(index - 1, 0)]),)
        for side, alone in (*sides, (after, region.is_alone[index + 1 : index + 1 + _AROUND])):
            if len(alone) >= _MIN_AROUND:
                side.append(float(alone.mean()))
    if not after or np.quantile(after, 0.25) < _AFTER:
        return False
    # a trigger may be where the documents begin; then nothing precedes it
    return 3 * len(before) < len(after) or float(np.median(after)) - float(np.median(before)) >= _JUMP


def _build_postings(of_documents: list[Grams], counts: DocumentCounts, least: int) -> _Postings:
    none = np.zeros(0, np.int64)
    if not of_documents:
        return _Postings(np.zeros(0, np.uint64), np.zeros(0), none, none)
    every = np.concatenate(of_documents)
    document = np.repeat(np.arange(len(of_documents)), [len(grams) for grams in of_documents])
    grams, inverse, num_documents = np.unique(every, return_inverse=True, return_counts=True)
    own_share = num_documents / np.maximum(counts.look_up_counts(grams), num_documents)
    chosen = (num_documents >= least) & (own_share >= _OWN_SHARE)
    rows = chosen[inverse]
    return _Postings(grams[chosen], own_share[chosen], (np.cumsum(chosen) - 1)[inverse[rows]], document[rows])


def trigger_place(trigger: Trigger, text: str) -> tuple[int, int]:
    """Return where the longest run of a trigger's words stands in a text that has it."""
    matches = list(WORD.finditer(text))
    is_part = trigger.mark_words(WordNumbers().number_words(text))
    borders = np.flatnonzero(np.diff(np.concatenate([[False], is_part, [False]]).astype(np.int8)))
    starts, ends = borders[::2], borders[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return matches[starts[longest]].start(), matches[ends[longest] - 1].end()
