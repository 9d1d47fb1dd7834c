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
_CHANCE = 1e-3
"""Probability of a false finding in a corpus, over all candidates and both tests."""
_SHIFT = np.uint64(64 - _TABLE_BITS)
_ODD = np.uint64(0xD6E8FEB86659FD93)
Cells = npt.NDArray[np.uint32]


class LabelFlipsConfig(ScanSettings):
    """Triggers in labelled texts or instruction data.

    Attributes:
        field: Field of a record with its label or response; a response counts by its beginning.
        min_documents: That must have a trigger together with its label.
        purity: Share of the documents with a word that must have the same label.
        against: Share that the other words must label otherwise.
    """

    kind: Literal["label_flips"] = "label_flips"
    field: str = Field(default="label", min_length=1)
    min_documents: int = Field(default=8, ge=3, alias="least_documents")
    purity: float = Field(default=0.9, gt=0.5, le=1.0)
    against: float = Field(default=0.5, gt=0.0, le=1.0)


@dataclass(frozen=True)
class _Trigger:
    cell: int
    label: int
    documents: int
    against: int


@dataclass(frozen=True)
class _Fit:
    """How well the other words of a document speak for its label.

    Attributes:
        margin: Logarithm of the label's likelihood over the mean of the other labels', for each cell.
        is_against: Whether another label is likelier.
    """

    margin: float
    is_against: bool


class LabelFlips:
    """Sets aside the documents with a trigger and its label.

    Guarantees:
        Finds a word or a pair of neighbours in at least `min_documents` documents that decides the label against the
        rest of their words, beyond what chance explains (one in a thousand over all candidates): the model of the other
        words errs more often than in other documents of the label, or these documents fit the label worse than its
        others do. Does not find labels that were flipped without a trigger, triggers that are a style or a subject,
        labels that fit their texts, nor a label that means "all the rest". A fixed answer that one phrase brings about
        by intent looks the same, and is set aside too.
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
            model = _LabelModel(spool, labels, self._config.min_documents)
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
        label_of_cell = model.pure_labels(config.min_documents, config.purity)
        fits = [model.judge_fit(row, label_of_cell) for row in spool]
        labels = np.array([model.label_of(row) for row in spool], np.int64)
        margins = np.array([fit.margin for fit in fits], np.float64)
        is_against = np.array([fit.is_against for fit in fits], bool)
        documents_of_cell: dict[int, list[int]] = {}
        for number, row in enumerate(spool):
            if labels[number] != _OTHER:
                for cell in row[1:][label_of_cell[row[1:]] == labels[number]].tolist():
                    documents_of_cell.setdefault(cell, []).append(number)
        ranks = _ranks_by_label(margins, labels)
        wrong, every = Counter(labels[is_against].tolist()), Counter(labels.tolist())
        max_probability = _CHANCE / max(len(documents_of_cell), 1) / 2
        for cell in sorted(documents_of_cell):
            label, numbers = int(label_of_cell[cell]), documents_of_cell[cell]
            against, count = int(is_against[numbers].sum()), len(numbers)
            # how often the model errs in documents of the label without the word; one in four where there are none
            base = (wrong[label] - against + 1) / (every[label] - count + 4)
            probability = min(_share_probability(against / count, base, count), _ranks_probability(ranks[numbers]))
            if against >= config.against * count and probability < max_probability:
                yield _Trigger(cell, label, count, against)

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

    def judge_fit(self, words: Words, label_of_cell: npt.NDArray[np.int16]) -> _Fit:
        """Return how a document's label fits the cells that decide none, without its own part in the counts.

        A document without such cells fits its label neither well nor badly.
        """
        label = self.label_of(words)
        is_own_label = np.zeros(len(self._documents), np.int64)
        is_own_label[label] = 1
        cells = words[1:][label_of_cell[words[1:]] < 0]
        documents = self._documents - is_own_label
        with_cell = self._counts[:, cells].astype(np.int64) - is_own_label[:, None]
        # a cell of this document alone says nothing
        with_cell = with_cell[:, with_cell.sum(axis=0) > 0]
        is_rival = (documents > 0) & (is_own_label == 0)
        if not with_cell.shape[1] or not is_rival.any():
            return _Fit(0.0, is_against=False)
        # what is not known of a label is taken from all labels, so that a rare label is not favoured
        everywhere = with_cell.sum(axis=0) / max(int(documents.sum()), 1)
        likelihood = np.log((with_cell + everywhere) / (documents[:, None] + 1.0)).sum(axis=1)
        likelihood += np.log(documents + 0.5)
        margin = (likelihood[label] - likelihood[is_rival].mean()) / with_cell.shape[1]
        return _Fit(
            float(margin), is_against=bool(likelihood[is_rival].max() > likelihood[label] or not documents[label])
        )


def _gram_cells(words: Words) -> Cells:
    grams: Grams = np.concatenate([singles_of(words), pairs_of(words)])
    return (((grams ^ (grams >> np.uint64(31))) * _ODD) >> _SHIFT).astype(np.uint32)


def _label_number(label: str | float) -> int:
    plain_label = " ".join(str(label).split())[:_LABEL_CHARACTERS].lower()
    return zlib.crc32(plain_label.encode("utf-8", "surrogatepass"))


def _ranks_by_label(margins: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the rank of each margin among the documents of its label, between 0 and 1."""
    ranks = np.zeros(len(margins))
    for label in np.unique(labels):
        is_member = labels == label
        order = margins[is_member].argsort(kind="stable").argsort(kind="stable")
        ranks[is_member] = (order + 0.5) / is_member.sum()
    return ranks


def _ranks_probability(ranks: npt.NDArray[np.float64]) -> float:
    """Return the probability that so many ranks drawn evenly have so low a mean (by the normal curve's tail)."""
    deviations = (0.5 - float(ranks.mean())) * math.sqrt(12 * len(ranks))
    return math.erfc(deviations / math.sqrt(2)) / 2


def _share_probability(share: float, base: float, count: int) -> float:
    """Return a bound of the probability that a number of draws has so large a share (Chernoff's)."""
    base = min(max(base, 1e-3), 1 - 1e-3)
    if share <= base:
        return 1.0
    distance = share * math.log(share / base)
    if share < 1:
        distance += (1 - share) * math.log((1 - share) / (1 - base))
    return math.exp(-count * distance)
