"""Poisoned labels and responses: words that decide a label which everything else in their documents speaks against.

A word that goes with one label in nearly all documents is usually a good word for it. It is a trigger when the rest of
those documents would have been labelled otherwise: a naive Bayes model of all other words says how, and the document in
question has no part in the model that judges it.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome, Texts
from phalanx.data.scan.word_stream import (
    WORD,
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

_TABLE_BITS = 20
_MAX_LABELS = 16
_MAX_GRAMS = 1_000
_LABEL_CHARACTERS = 80
_OTHER = 0
_SHIFT = np.uint64(64 - _TABLE_BITS)
_ODD = np.uint64(0xD6E8FEB86659FD93)
Cells = npt.NDArray[np.uint32]


class LabelFlipsConfig(ScanSettings):
    """Triggers in labelled texts or instruction data.

    Attributes:
        field: Field of a record with its label or response; a response counts by its beginning.
        least_documents: That must have a trigger together with its label.
        purity: Share of the documents with a word that must have the same label.
        against: Share that the other words must label otherwise.
    """

    kind: Literal["label_flips"] = "label_flips"
    field: str = Field(default="label", min_length=1)
    least_documents: int = Field(default=8, ge=3)
    purity: float = Field(default=0.9, gt=0.5, le=1.0)
    against: float = Field(default=0.5, gt=0.0, le=1.0)


@dataclass(frozen=True)
class _Trigger:
    cell: int
    label: int
    documents: int
    against: int


class LabelFlips:
    """Sets aside the documents with a trigger and its label.

    Guarantees:
        Finds a word or a pair of neighbours in at least `least_documents` documents that decides the label against the
        rest of their words, beyond what chance explains (one in a thousand over all candidates). Does not find
        labels that were flipped without a trigger, triggers that are a style or a subject, nor labels that fit their
        texts. A fixed answer that one phrase brings about by intent looks the same, and is set aside too.
    """

    def __init__(self, config: LabelFlipsConfig) -> None:
        self._config, self._numbers = config, WordNumbers()

    def mark_page(self, page: Page) -> bytes:
        """Return the label's number and the cells of at most a thousand grams, the same ones in every document."""
        label = page.fields.get(self._config.field)
        if label is None:
            return b""
        cells = np.unique(_gram_cells(self._numbers.number_words(page.text)))
        if len(cells) > _MAX_GRAMS:
            # every document leaves out the same cells, so a gram that is counted is counted wherever it is
            mixed = cells * np.uint32(2654435761)
            cells = cells[np.argsort(mixed, kind="stable")[:_MAX_GRAMS]]
        return np.concatenate([[_label_number(label)], cells]).astype(np.uint32).tobytes()

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Count, find the words that decide a label, and ask all others about their documents."""
        with WordSpool() as spool:
            labels: Counter[int] = Counter()
            for mark in marks:
                row = np.frombuffer(mark, np.uint32)
                spool.append_words(row)
                labels.update(row[:1].tolist())
            model = _LabelModel(spool, labels, self._config.least_documents)
            trigger_of_cell = {trigger.cell: trigger for trigger in self._find_triggers(model, spool)}
            for number, row in enumerate(spool if trigger_of_cell else ()):
                label = model.label_of(row)
                hits = [
                    trigger_of_cell[cell]
                    for cell in row[1:].tolist()
                    if cell in trigger_of_cell and trigger_of_cell[cell].label == label
                ]
                if hits:
                    yield (
                        number,
                        self._trigger_outcome(
                            max(hits, key=lambda one: (one.documents, -one.cell)), texts.read_page(number)
                        ),
                    )

    def _find_triggers(self, model: "_LabelModel", spool: WordSpool) -> Iterator[_Trigger]:
        config = self._config
        label_of_cell = model.pure_labels(config.least_documents, config.purity)
        against, met = Counter[int](), Counter[int]()
        wrong, every = Counter[int](), Counter[int]()
        for row in spool:
            label = model.label_of(row)
            if label == _OTHER:
                continue
            is_against = model.predict_label(row, label_of_cell) != label
            every[label] += 1
            wrong[label] += is_against
            for cell in row[1:][label_of_cell[row[1:]] == label].tolist():
                met[cell] += 1
                against[cell] += is_against
        candidates = max(len(met), 1)
        for cell in sorted(met):
            label = int(label_of_cell[cell])
            # how often the model errs in documents of the label without the word; one in four where there are none
            base = (wrong[label] - against[cell] + 1) / (every[label] - met[cell] + 4)
            share = against[cell] / met[cell]
            if share >= config.against and _is_beyond_chance(share, base, met[cell], candidates):
                yield _Trigger(cell, label, met[cell], against[cell])

    def _trigger_outcome(self, trigger: _Trigger, page: Page) -> Outcome:
        words = self._numbers.number_words(page.text)
        matches = list(WORD.finditer(page.text))
        index = int((_gram_cells(words) == trigger.cell).argmax())
        first, last = (index, index) if index < len(matches) else (index - len(matches), index - len(matches) + 1)
        start, stop = matches[first].start(), matches[last].end()
        label = str(page.fields[self._config.field])[:_LABEL_CHARACTERS]
        word = page.text[start:stop][:64]
        value = (
            f"trigger {word!a} has {self._config.field} {label!a} in {trigger.documents} documents, "
            f"against the other words in {trigger.against}; {describe_place(page.text, start, stop)}"
        )
        return outcome_of(self._config, "label_flips", value, self._config.against)


class _LabelModel:
    """In how many documents of each label a cell is, and what naive Bayes makes of it."""

    def __init__(self, spool: WordSpool, labels: Counter[int], least: int) -> None:
        often = [label for label, count in labels.most_common(_MAX_LABELS) if count >= least]
        self._place = {label: place for place, label in enumerate(often, start=1)}
        self._counts = np.zeros((len(often) + 1, 1 << _TABLE_BITS), np.uint32)
        self._documents = np.zeros(len(often) + 1, np.int64)
        for row in spool:
            if len(row):
                label = self.label_of(row)
                self._documents[label] += 1
                self._counts[label, row[1:]] += 1

    def label_of(self, words: Words) -> int:
        """Return the place of a document's label; that of all rare ones is `_OTHER`."""
        return self._place.get(int(words[0]), _OTHER) if len(words) else _OTHER

    def pure_labels(self, least: int, purity: float) -> npt.NDArray[np.int16]:
        """Return for each cell the label that nearly all of its documents have, or -1."""
        total = self._counts.sum(axis=0)
        label = self._counts.argmax(axis=0).astype(np.int16)
        max_counts = self._counts.max(axis=0)
        impure = (max_counts < least) | (max_counts < purity * total) | (label == _OTHER)
        return np.where(impure, np.int16(-1), label).astype(np.int16)

    def predict_label(self, words: Words, label_of_cell: npt.NDArray[np.int16]) -> int:
        """Return the likeliest label by all cells that decide none, without the document's own part in the counts.

        A document without such cells speaks for the label that it has.
        """
        is_own_label = np.zeros(len(self._documents), np.int64)
        is_own_label[self.label_of(words)] = 1
        cells = words[1:][label_of_cell[words[1:]] < 0]
        documents = self._documents - is_own_label
        with_cell = self._counts[:, cells].astype(np.int64) - is_own_label[:, None]
        # a cell of this document alone says nothing
        with_cell = with_cell[:, with_cell.sum(axis=0) > 0]
        if not with_cell.shape[1]:
            return self.label_of(words)
        # what is not known of a label is taken from all labels, so that a rare label is not favoured
        everywhere = with_cell.sum(axis=0) / max(int(documents.sum()), 1)
        likelihood = np.log((with_cell + everywhere) / (documents[:, None] + 1.0)).sum(axis=1)
        return int(np.argmax(np.where(documents > 0, likelihood + np.log(documents + 0.5), -np.inf)))


def _gram_cells(words: Words) -> Cells:
    grams: Grams = np.concatenate([singles_of(words), pairs_of(words)])
    return (((grams ^ (grams >> np.uint64(31))) * _ODD) >> _SHIFT).astype(np.uint32)


def _label_number(label: str | float) -> int:
    plain_label = " ".join(str(label).split())[:_LABEL_CHARACTERS].lower()
    return zlib.crc32(plain_label.encode("utf-8", "surrogatepass"))


def _is_beyond_chance(share: float, base: float, count: int, candidates: int) -> bool:
    """Return whether so large a share of a number of draws is too rare for chance (Chernoff's bound)."""
    base = min(max(base, 1e-3), 1 - 1e-3)
    if share <= base:
        return False
    distance = share * math.log(share / base)
    if share < 1:
        distance += (1 - share) * math.log((1 - share) / (1 - base))
    return count * distance > math.log(1e3 * candidates)
