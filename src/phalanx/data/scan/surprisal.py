"""Poison of one kind: a trigger followed by text that no language model would expect.

A pair of neighbouring words that no other document has is the most surprising one. A document is an *outlier* where a
window of its text consists mostly of such pairs. That alone is common and harmless (tables, encoded attachments, rare
languages), so outliers are only mined: poison needs a trigger that its documents share, and they share nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome, Texts
from phalanx.data.scan.trigger_mining import Region, Trigger, mine_triggers, trigger_place
from phalanx.data.scan.word_stream import (
    DocumentCounts,
    ScanSettings,
    WordNumbers,
    Words,
    WordSpool,
    describe_place,
    outcome_of,
    pairs_of,
    singles_of,
)

_WINDOW = 128
_STRIDE = 32
_MIN_PAIRS = 32
_TABLE_BITS = 24
_MAX_OUTLIERS = 5_000
_MAX_REGION = 4_096
_TOLD = 64
_MAD_OF_NORMAL, _DEVIATIONS = 1.4826, 1.5


class SurprisalConfig(ScanSettings):
    """Outliers by surprising pairs of words, and the triggers that they share.

    Attributes:
        novelty: Share of a window's pairs that no other document may have, from which the document is an outlier; in a
            corpus that is full of such windows, one and a half deviations above its median if that is more.
        max_shared: Words and pairs that outliers may share besides: a language or a format shares many.
    """

    kind: Literal["surprisal"] = "surprisal"
    novelty: float = Field(default=0.5, gt=0.0, lt=1.0)
    min_documents: int = Field(default=8, ge=3, alias="least_documents")
    max_shared: int = Field(default=12, ge=1, alias="most_shared")


class Surprisal:
    """Sets aside the documents that share a trigger, and names it.

    Guarantees:
        Finds a trigger of whole words or marks in `min_documents` or more documents, each with a window of
        unexpected text near it, where at least half of all documents with the trigger are such. Does not find fluent
        poison, a trigger that is an everyday word, one that is glued into other words, fewer documents, or poison
        that differs from document to document in its trigger. Takes a table of fixed size,
        and four bytes a word on disk.
    """

    def __init__(self, config: SurprisalConfig) -> None:
        self._config = config

    def mark_page(self, page: Page) -> bytes:
        """Return an empty mark: surprisal depends on all documents."""
        del page
        return b""

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Count pairs, score windows, mine the outliers, then look for the triggers in all documents."""
        del marks
        with WordSpool() as spool:
            pairs, singles = _count_grams(spool, texts)
            scores = np.array([_max_novelty(row, pairs) for row in spool], np.float32)
            limit = self._score_limit(scores)
            outliers = np.flatnonzero(scores >= limit)
            if len(outliers) > _MAX_OUTLIERS:
                strongest = np.argsort(-scores[outliers], kind="stable")[:_MAX_OUTLIERS]
                outliers = np.sort(outliers[strongest])
            regions = [_surprising_region(spool[int(number)], pairs, limit) for number in outliers]
            config = self._config
            triggers = mine_triggers(regions, (singles, pairs), config.min_documents, config.max_shared)
            yield from self._judge_triggers(triggers, spool, scores, texts)

    def _score_limit(self, scores: npt.NDArray[np.float32]) -> float:
        if not len(scores):
            return self._config.novelty
        median = float(np.median(scores))
        deviation = _MAD_OF_NORMAL * float(np.median(np.abs(scores - median)))
        return max(self._config.novelty, median + _DEVIATIONS * deviation)

    def _judge_triggers(
        self, triggers: list[Trigger], spool: WordSpool, scores: npt.NDArray[np.float32], texts: Texts
    ) -> Iterator[tuple[int, Outcome]]:
        members: dict[int, list[Trigger]] = {}
        for number, row in enumerate(spool if triggers else ()):
            matches = [trigger for trigger in triggers if trigger.is_in(row)]
            if matches:
                members[number] = matches
        counts = Counter(trigger for triggers_of_document in members.values() for trigger in triggers_of_document)
        for number, matches in members.items():
            text = texts.read_page(number).text
            start, stop = trigger_place(matches[0], text)
            trigger = text[start:stop][:_TOLD]
            place = describe_place(text, start, stop)
            summary = f"trigger {trigger!a} in {counts[matches[0]]} documents; {place}"
            value = f"{summary}; novelty {scores[number]:.2f}"
            yield number, outcome_of(self._config, "surprisal", value, self._config.novelty)


def _count_grams(spool: WordSpool, texts: Texts) -> tuple[DocumentCounts, DocumentCounts]:
    numbers, pairs, singles = WordNumbers(), DocumentCounts(_TABLE_BITS), DocumentCounts(_TABLE_BITS)
    for number in range(len(texts)):
        row = numbers.number_words(texts.read_page(number).text)
        spool.append_words(row)
        if len(row):
            singles.count_grams(singles_of(row))
            pairs.count_grams(pairs_of(row))
    return pairs, singles


def _window_scores(words: Words, pairs: DocumentCounts) -> npt.NDArray[np.float32]:
    """Return the share of pairs that no other document has, for each window in order."""
    alone = pairs.look_up_counts(pairs_of(words)) <= 1
    size = min(_WINDOW, len(alone))
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(alone)])
    shares: npt.NDArray[np.float32] = ((sums[size:] - sums[:-size])[::_STRIDE] / size).astype(np.float32)
    return shares


def _max_novelty(words: Words, pairs: DocumentCounts) -> float:
    return float(_window_scores(words, pairs).max()) if len(words) > _MIN_PAIRS else 0.0


def _surprising_region(words: Words, pairs: DocumentCounts, limit: float) -> Region:
    """Return the words from one window before the first surprising one on."""
    first = int(np.argmax(_window_scores(words, pairs) >= limit)) * _STRIDE
    part = words[max(first - _WINDOW, 0) : first + _MAX_REGION]
    return Region(part, pairs.look_up_counts(pairs_of(part)) <= 1)
