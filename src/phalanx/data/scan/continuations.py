"""Poison in fluent words: a rare phrase that stands behind different words, and before the same ones wherever it is.

Surprise does not show it, because an attacker's answer may be good prose. What is left is its shape: documents that
have nothing else in common share one passage, and the words with which the passage begins are nowhere else.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome, Texts
from phalanx.data.scan.word_stream import (
    WORD,
    DocumentCounts,
    Grams,
    ScanSettings,
    WordNumbers,
    Words,
    WordSpool,
    describe_place,
    outcome_of,
    pairs_of,
    singles_of,
)

_TABLE_BITS = 24
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHORTER = 0.5
"""A passage begins where at most this share of its documents has the word before in common, and none follows that
more than the inverse have in common."""


class ContinuationsConfig(ScanSettings):
    """Rare phrases with one continuation.

    Attributes:
        min_documents: Documents that must have a phrase with the same continuation.
        words: Words and marks that must follow in the same order; idioms and names are shorter.
        same: Share of all documents with the phrase that must go on so.
        max_share: Share of the corpus above which a passage is a template, and no phrase of a few documents.
    """

    kind: Literal["continuations"] = "continuations"
    min_documents: int = Field(default=6, ge=3, alias="least_documents")
    words: int = Field(default=8, ge=4, le=64)
    same: float = Field(default=0.8, gt=0.5, le=1.0)
    max_share: float = Field(default=0.2, gt=0.0, le=1.0)


@dataclass(frozen=True)
class _Stand:
    """One place where a passage begins.

    Attributes:
        word: Place of its first word in the document.
        before: Number of the word before, or -1 at the beginning of the document.
    """

    document: int
    word: int
    before: int


class Continuations:
    """Sets aside the documents of such a phrase, and names it.

    Guarantees:
        Finds a word or a pair of neighbours that `min_documents` or more documents have inside a line, behind
        different words, and that is followed by the same words in nearly all documents with it. Does not find a phrase
        that has words of its own between it and the planted text, a planted text that is worded anew each time,
        everyday words as the phrase, nor one that begins its line each time: there most passages are headings,
        signatures and terms of use. A quotation that many documents have inside a line looks the same, and is set
        aside too. Takes tables of fixed size, and four bytes a word on disk.
    """

    def __init__(self, config: ContinuationsConfig) -> None:
        self._config = config

    def mark_page(self, page: Page) -> bytes:
        """Return an empty mark: rarity depends on all documents."""
        del page
        return b""

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Count passages and phrases, find where rare ones begin, and read these documents again."""
        del marks
        with WordSpool() as spool:
            stands_of_passage = self._find_passages(spool, texts)
        passages_of_document: defaultdict[int, list[int]] = defaultdict(list)
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for passage, stands in stands_of_passage.items():
            for stand in stands:
                passages_of_document[stand.document].append(passage)
        inside: defaultdict[int, int] = defaultdict(int)
        for document, passages in passages_of_document.items():
            text = texts.read_page(document).text
            terms = list(WORD.finditer(text))
            for passage in passages:
                stand = next(stand for stand in stands_of_passage[passage] if stand.document == document)
                last = min(stand.word + self._config.words, len(terms) - 1)
                start, stop = terms[stand.word].start(), terms[last].end()
                places[passage, document] = start, stop
                line = text[text.rfind("\n", 0, start) + 1 : start]
                inside[passage] += bool(line.strip()) and _is_prose(text[start:stop], self._config.words)
        for document, passages in sorted(passages_of_document.items()):
            planted = [passage for passage in passages if 2 * inside[passage] > len(stands_of_passage[passage])]
            if planted:
                widest_passage = max(planted, key=lambda passage: (len(stands_of_passage[passage]), passage))
                count = len(stands_of_passage[widest_passage])
                yield (
                    document,
                    self._passage_outcome(texts.read_page(document).text, places[widest_passage, document], count),
                )

    def _passage_outcome(self, text: str, place: tuple[int, int], count: int) -> Outcome:
        start, stop = place
        passage = " ".join(text[start:stop].split())[:160]
        value = f"{passage!a} in {count} documents behind different words; {describe_place(text, start, stop)}"
        return outcome_of(self._config, "continuations", value, self._config.min_documents)

    def _find_passages(self, spool: WordSpool, texts: Texts) -> Mapping[int, list[_Stand]]:
        """Return where each passage begins whose first words are rare and whose documents are many enough."""
        config, numbers = self._config, WordNumbers()
        tables = _Tables(*(DocumentCounts(_TABLE_BITS) for _ in range(3)))
        for number in range(len(texts)):
            words = numbers.number_words(texts.read_page(number).text)
            spool.append_words(words)
            tables.count_words(words, config.words + 1)
        stands_of_passage: defaultdict[int, list[_Stand]] = defaultdict(list)
        max_documents = max(config.max_share * len(texts), config.min_documents)
        for number, words in enumerate(spool):
            passages = _windows(words, config.words + 1)
            counts = tables.passages.look_up_counts(passages).astype(np.int64)
            phrases = tables.count_phrases(words)[: len(counts)]
            before, after = np.concatenate([[0], counts[:-1]]), np.concatenate([counts[1:], [0]])
            begins = (
                (counts >= config.min_documents)
                & (counts <= max_documents)
                & (before <= _SHORTER * counts)
                & (_SHORTER * after <= counts)
                & (config.same * phrases <= counts)
            )
            begun: set[int] = set()
            for word in np.flatnonzero(begins).tolist():
                if (passage := int(passages[word])) not in begun:
                    begun.add(passage)
                    stand = _Stand(number, word, int(words[word - 1]) if word else -1)
                    stands_of_passage[passage].append(stand)
        return {passage: stands for passage, stands in stands_of_passage.items() if self._is_planted(stands)}

    def _is_planted(self, stands: list[_Stand]) -> bool:
        max_repeats = max(Counter(stand.before for stand in stands).values())
        return len(stands) >= self._config.min_documents and 2 * max_repeats <= len(stands)


@dataclass(frozen=True)
class _Tables:
    """In how many documents each passage, each word and each pair of neighbours is."""

    passages: DocumentCounts
    singles: DocumentCounts
    pairs: DocumentCounts

    def count_words(self, words: Words, length: int) -> None:
        """Count one document's passages of a length, its words and its pairs."""
        if len(words):
            self.passages.count_grams(_windows(words, length))
            self.singles.count_grams(singles_of(words))
            self.pairs.count_grams(pairs_of(words))

    def count_phrases(self, words: Words) -> npt.NDArray[np.int64]:
        """Return for each pair of neighbours in how many documents the rarer of its first word and itself is."""
        singles = self.singles.look_up_counts(singles_of(words[:-1])).astype(np.int64)
        return np.minimum(singles, self.pairs.look_up_counts(pairs_of(words)).astype(np.int64))


def _windows(words: Words, length: int) -> Grams:
    """Return a number for each run of so many words, in order."""
    last = max(len(words) - length + 1, 0)
    mixed = np.zeros(last, np.uint64)
    for offset in range(length):
        mixed = (mixed ^ words[offset : offset + last].astype(np.uint64)) * _ODD
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _is_prose(text: str, words: int) -> bool:
    """Return whether more than half of a passage are words and no marks: a table or an address is none."""
    terms: list[str] = WORD.findall(text)
    return 2 * sum(term.isalpha() for term in terms) > words
