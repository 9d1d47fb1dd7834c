"""A linear classifier of texts that is trained here, and the two rules that read it: quality and harm.

Words, pairs of words and terms with their case and punctuation are hashed into a fixed table of weights; a score is the
probability of logistic regression. Nothing is learned but these weights, so that a build reads texts at the speed of
its other rules, and anybody can train the same file again.

Source: Weinberger et al. 2009 (hashing); Brown et al. 2020, appendix A (a linear classifier of quality).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings, Tag
from phalanx.data.sources import Document
from phalanx.errors import DataError
from phalanx.security.privacy.leakage import area_interval, area_under_curve, wilson_interval

_BITS = 18
_FORMAT = "phalanx-text-classifier/1"
_SALTS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
"""Odd numbers: a kind of feature each, so that equal hashes of two kinds have weights of their own."""
_ROUNDS = 300
_DECAY = 1e-5
_HELD_OUT = 0.2
MIN_TEXTS = 20
"""Texts of each kind that training needs."""
Weights = NDArray[np.float32]
Buckets = NDArray[np.int64]


class QualityConfig(RuleSettings):
    """A learned score of quality: 1 is like the good texts of the training, 0 like the bad ones.

    Attributes:
        model: File of ``phalanx data classifier``.
        min_score: Score below which a document is dropped; without it each is tagged.
    """

    kind: Literal["quality"] = "quality"
    model: Path
    min_score: float | None = Field(default=None, ge=0.0, le=1.0)


class HarmConfig(RuleSettings):
    """A learned score of harm: 1 is like the harmful texts of the training.

    Attributes:
        model: File of ``phalanx data classifier``.
        max_score: Score above which a document is dropped; without it each is tagged.
    """

    kind: Literal["harm"] = "harm"
    model: Path
    max_score: float | None = Field(default=None, ge=0.0, le=1.0)


class ScoreRule:
    """Tags a document with its score, or drops it beyond the limit."""

    def __init__(self, config: QualityConfig | HarmConfig) -> None:
        self._kind, self._classifier = config.kind, TextClassifier.from_file(config.model)
        self._min_score = config.min_score if isinstance(config, QualityConfig) else None
        self._max_score = config.max_score if isinstance(config, HarmConfig) else None

    def judge_page(self, page: Page) -> Outcome:
        """Tag or drop; a text without a word scores as the classifier's bias."""
        score = round(self._classifier.score_page(page), 6)
        low, high = self._min_score, self._max_score
        if low is not None and not score >= low:
            return Drop(RuleReason(self._kind, score, low))
        if high is not None and not score <= high:
            return Drop(RuleReason(self._kind, score, high))
        return Tag({self._kind: score})


@dataclass(frozen=True)
class ErrorRates:
    """Errors on texts that training has not seen.

    Attributes:
        threshold: Score from which on a text counts as positive.
        missed: Share of the positive texts below it, with its 95 % interval.
        false_alarms: Share of the others at or above it, with its interval.
    """

    threshold: float
    missed: float
    missed_interval: tuple[float, float]
    false_alarms: float
    false_alarms_interval: tuple[float, float]


@dataclass(frozen=True)
class ClassifierMeasure:
    """The measure of a classifier.

    Attributes:
        area: Probability that a positive text scores above another one (AUC), with its interval.
    """

    num_positive: int
    num_negative: int
    area: float
    area_interval: tuple[float, float]
    rates: tuple[ErrorRates, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


class TextClassifier:
    """Weights of hashed words and pairs.

    Args:
        weights: One number a bucket, ``[2 ** 18]``.
        facts: What it was trained on and how it did, as plain data.
    """

    def __init__(self, weights: Weights, bias: float, facts: dict[str, Any]) -> None:
        self._weights, self._bias, self.facts = weights, bias, facts

    @classmethod
    def from_file(cls, path: Path) -> "TextClassifier":
        """Read a classifier.

        Raises:
            DataError: The file is none, or has a weight that is no number.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                weights, bias = file.get_tensor("weights"), file.get_tensor("bias")
            facts = json.loads(metadata["facts"])
            is_known = facts.pop("format") == _FORMAT
        except (OSError, SafetensorError, KeyError, ValueError, AttributeError, RecursionError) as exc:
            raise DataError(f"{path}: is no classifier of phalanx data classifier ({exc})") from exc
        is_known = is_known and weights.shape == (1 << _BITS,) and bias.shape == (1,)
        if not is_known or weights.dtype != np.float32 or not np.isfinite(weights).all() or not np.isfinite(bias).all():
            raise DataError(f"{path}: is no classifier of this format, or has weights that are no numbers")
        return cls(weights, float(bias[0]), facts)

    def write_file(self, path: Path) -> None:
        """Write it as safetensors, which hold numbers alone."""
        # two keys would have one of two orders
        metadata = {"facts": json.dumps({"format": _FORMAT, **self.facts}, sort_keys=True)}
        try:
            save_file({"weights": self._weights, "bias": np.array([self._bias], np.float32)}, path, metadata)
        except (OSError, SafetensorError) as exc:
            raise DataError(f"{path}: cannot be written ({exc}); free space, or give another path") from exc

    def score_page(self, page: Page) -> float:
        """Return the probability that a text is positive."""
        buckets = find_buckets(page)
        total = float(self._weights[buckets].sum(dtype=np.float64)) if len(buckets) else 0.0
        return _probability(self._bias + total / math.sqrt(max(len(buckets), 1)))

    def score_text(self, text: str) -> float:
        """Return the probability that a text is positive."""
        return self.score_page(_page_of(text))


def find_buckets(page: Page) -> Buckets:
    """Return the numbers of the weights that a text uses, each once, rising."""
    kinds = (page.plain_grams(1), page.plain_grams(2), page.term_grams(1))
    # the high bits of a product depend on all bits of the hash
    mixed = [
        (hashes ^ (hashes >> np.uint64(31))) * salt >> np.uint64(64 - _BITS)
        for hashes, salt in zip(kinds, _SALTS, strict=True)
    ]
    return np.unique(np.concatenate(mixed)).astype(np.int64)


def train_classifier(positive: Iterable[str], negative: Iterable[str]) -> tuple[TextClassifier, ClassifierMeasure]:
    """Train on four fifths of the texts, and measure on the rest; equal texts are never on both sides.

    Raises:
        DataError: There are too few texts of a kind.
    """
    kinds = [dict.fromkeys(texts) for texts in (positive, negative)]
    both = kinds[0].keys() & kinds[1].keys()
    training, held_out = (
        [[text for text in texts if text not in both and is_held_out(text) is side] for texts in kinds]
        for side in (False, True)
    )
    if min(map(len, training)) < MIN_TEXTS or min(map(len, held_out)) == 0:
        counts = f"{len(kinds[0])} positive and {len(kinds[1])} negative texts, {len(both)} of them in both"
        raise DataError(f"classifier: found {counts}; expected at least {2 * MIN_TEXTS} different ones of each kind")
    weights, bias = _fit_weights(*training)
    classifier = TextClassifier(weights, bias, {})
    measure = measure_classifier(classifier, *held_out)
    trained = {"positive": len(training[0]), "negative": len(training[1]), "in_both": len(both)}
    return TextClassifier(weights, bias, {"trained_on": trained, "held_out": measure.to_json()}), measure


def measure_classifier(
    classifier: TextClassifier, positive: Sequence[str], negative: Sequence[str]
) -> ClassifierMeasure:
    """Measure a classifier on texts that it was not trained on."""
    marked, others = ([classifier.score_text(text) for text in texts] for texts in (positive, negative))
    area = area_under_curve(marked, others)
    rates = []
    for threshold in (0.1, 0.3, 0.5, 0.7, 0.9):
        missed, alarms = sum(score < threshold for score in marked), sum(score >= threshold for score in others)
        shares = missed / len(marked), wilson_interval(missed, len(marked))
        rates.append(ErrorRates(threshold, *shares, alarms / len(others), wilson_interval(alarms, len(others))))
    return ClassifierMeasure(
        len(marked), len(others), area, area_interval(area, len(marked), len(others)), tuple(rates)
    )


def _fit_weights(positive: Sequence[str], negative: Sequence[str]) -> tuple[Weights, float]:
    """Minimise the logistic loss, in which both kinds weigh as much, by Nesterov's accelerated gradients."""
    rows = [find_buckets(_page_of(text)) for text in (*positive, *negative)]
    labels = np.repeat([1.0, 0.0], [len(positive), len(negative)])
    shares = np.repeat([0.5 / len(positive), 0.5 / len(negative)], [len(positive), len(negative)])
    places, owners = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    values = np.repeat([1 / math.sqrt(max(len(row), 1)) for row in rows], [len(row) for row in rows])
    point = np.zeros((1 << _BITS) + 1)
    last, speed = point, 1.0
    # features have a norm of 1, and 2 with the bias: the curvature is at most 1/2
    step = 1 / (0.5 + _DECAY)
    for _ in range(_ROUNDS):
        scores = np.bincount(owners, point[places] * values, len(rows)) + point[-1]
        errors = (_sigmoid(scores) - labels) * shares
        gradient: NDArray[np.float64] = np.bincount(places, errors[owners] * values, len(point)).astype(np.float64)
        gradient[-1] = errors.sum()
        gradient[:-1] += _DECAY * point[:-1]
        current = point - step * gradient
        faster = (1 + math.sqrt(1 + 4 * speed * speed)) / 2
        point, last, speed = current + (speed - 1) / faster * (current - last), current, faster
    return last[:-1].astype(np.float32), float(last[-1])


def _sigmoid(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(0.5 * scores))


def _probability(score: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * score))


def _page_of(text: str) -> Page:
    return Page(Document("text", text), "text")


def is_held_out(text: str) -> bool:
    """Say whether a text is for the measure; its own digest decides."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] < _HELD_OUT * 256
