"""Scores of a model on held-out rows: perplexity of text, or how often a class was found."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.data import Batch
from phalanx.data.config import HELD_OUT
from phalanx.data.tasks import majority_share, tfidf_predictions
from phalanx.errors import CheckpointError, DataError
from phalanx.models import StageModule
from phalanx.objectives import ConfusionMatrix
from phalanx.telemetry import Histogram
from phalanx.train.batches.labelled import LabelledTexts
from phalanx.train.batches.preferences import PreferenceScores, read_preference_scores
from phalanx.train.batches.samples import TextSample

_FEWEST = 2
"""Classes that a logistic regression can tell apart."""

_MAX_PLAIN = 1e7
"""Perplexity from which on its digits say less than its size."""


@dataclass(frozen=True)
class Scores:
    """The scores of a classifier on held-out texts.

    Attributes:
        loss: Mean cross-entropy of a text, in nats.
        macro_f1: Mean over the classes of precision's and recall's harmonic mean.
    """

    loss: float
    accuracy: float
    macro_f1: float

    @classmethod
    def from_predictions(
        cls, total_loss: float, predicted: Sequence[int], true: Sequence[int], num_classes: int
    ) -> "Scores":
        """Count predictions."""
        confusion = ConfusionMatrix.count_answers(predicted, true, num_classes)
        return cls(total_loss / len(true), confusion.accuracy, confusion.macro_f1)

    @classmethod
    def from_counts(cls, total_loss: float, classes: Sequence[tuple[int, int, int]]) -> "Scores":
        """Compute scores from counts.

        Args:
            classes: For each class: its texts, the texts that were taken for it, and right ones.
        """
        texts = sum(true for true, _, _ in classes)
        if not texts:
            raise DataError("held-out texts: none to score")
        # as `ConfusionMatrix.macro_f1` has it
        shares = [2 * right / (predicted + true) for true, predicted, right in classes if predicted + true]
        return cls(total_loss / texts, sum(right for _, _, right in classes) / texts, sum(shares) / len(shares))


@dataclass(frozen=True)
class MeanReward:
    """The mean reward of a model's texts for held-out prompts.

    Attributes:
        reward: Not a number where no prompt is held out.
        parts: Each reward by itself, by name.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


Validation = float | Scores | PreferenceScores | MeanReward
"""Perplexity of held-out text, the scores of a classifier or of pairs, or the mean reward of texts."""


StageJudge = Callable[[Iterable[StageModule], Sequence[Iterable[Batch]]], Sequence[Validation]]
"""Measures stages, each of which is used once, on the held-out batches of each set."""


@dataclass(frozen=True)
class ValidationResult:
    """The result of one validation: of the held-out share, and of each further set by name.

    Attributes:
        own: Result on the held-out share; None where nothing is held out.
        named: Perplexity of each further set, or the scores of its pairs.
        histograms: Histograms of weights and of their gradients' running means.
    """

    own: Validation | None
    named: Mapping[str, float | PreferenceScores] = field(default_factory=dict)
    samples: tuple[TextSample, ...] = ()
    histograms: tuple[Histogram, ...] = ()

    def loss_on(self, name: str) -> float:
        """Return the mean loss on one set, in nats a token or a text; infinity where it is no finite number.

        Of a mean reward it is the negative.
        """
        value: Validation | None = self.own if name == HELD_OUT else self.named.get(name)
        if value is None:
            raise DataError(f'validation set "{name}": is not measured; choices: {", ".join(self.set_names) or "none"}')
        if isinstance(value, MeanReward):
            loss = -value.reward
        else:
            loss = loss_of(value) if isinstance(value, float) else value.loss
        return loss if math.isfinite(loss) else math.inf

    @property
    def set_names(self) -> tuple[str, ...]:
        """Names of the sets that were measured."""
        return (*((HELD_OUT,) if self.own is not None else ()), *self.named)

    def metrics_row(self) -> dict[str, Any]:
        """The columns of a step's line in the metrics."""
        named = {name: set_figures(value) for name, value in self.named.items()}
        samples = [asdict(sample) for sample in self.samples]
        drawn = [histogram.metrics_row() for histogram in self.histograms]
        more = {"validation_sets": named, "samples": samples, "histograms": drawn}
        return {**validation_row(self.own), **{name: scores for name, scores in more.items() if scores}}

    def curve_points(self) -> dict[str, float]:
        """The points of TensorBoard's curves by tag."""
        held_out = {
            name.replace("_", "/", 1): score for name, score in validation_row(self.own).items() if score is not None
        }
        named = {
            f"validation/{name}/{figure}": score
            for name, value in self.named.items()
            for figure, score in set_figures(value).items()
            if score is not None
        }
        return {**held_out, **named}

    def __str__(self) -> str:
        parts = [] if self.own is None else [describe_validation(self.own)]
        words = (describe_validation(value).removeprefix("validation ") for value in self.named.values())
        return ", ".join([*parts, *(f"{name} {text}" for name, text in zip(self.named, words, strict=True))])


def set_figures(value: float | PreferenceScores) -> dict[str, float | None]:
    """Return the figures of one further validation set."""
    return asdict(value) if isinstance(value, PreferenceScores) else {"loss": loss_of(value), "perplexity": value}


def loss_of(perplexity: float) -> float:
    """Return the loss in nats that a perplexity stands for; not a number where it is none."""
    return math.log(perplexity) if perplexity > 0 else math.nan


def describe_validation(value: Validation) -> str:
    """Describe a validation for a person."""
    if isinstance(value, Scores):
        return f"validation accuracy {value.accuracy:.3f}, macro-F1 {value.macro_f1:.3f}"
    if isinstance(value, PreferenceScores):
        divergence = "" if value.kl is None else f", {value.kl:.4f} nats a token from the reference"
        return f"validation accuracy {value.accuracy:.3f}, margin {value.margin:.3f}{divergence}"
    if isinstance(value, MeanReward):
        return f"validation reward {value.reward:.3f}"
    return f"validation perplexity {value:.1f}" if value < _MAX_PLAIN else f"validation perplexity {value:.2e}"


def validation_row(value: Validation | None) -> dict[str, float | None]:
    """Return the columns of a validation in a step's line of the metrics."""
    if isinstance(value, Scores | PreferenceScores):
        return {"validation_perplexity": None, **{f"validation_{name}": score for name, score in asdict(value).items()}}
    if isinstance(value, MeanReward):
        parts = {f"validation_reward_{name}": part for name, part in value.parts.items()}
        return {"validation_perplexity": None, "validation_reward": value.reward, **parts}
    return {"validation_perplexity": value}


def read_scores(saved: object) -> Scores:
    """Read the scores of a checkpoint; a loss of null is an infinity."""
    names = ("loss", "accuracy", "macro_f1")
    if isinstance(saved, dict) and saved.get("loss", 0) is None:
        saved = saved | {"loss": math.inf}
    if (
        not isinstance(saved, dict)
        or set(saved) != set(names)
        or not all(type(score) is float for score in saved.values())
    ):
        raise CheckpointError(
            f"checkpoint: scores {saved!r:.80}, expected numbers {', '.join(names)}; use an older one"
        )
    return Scores(**saved)


def read_named(saved: object) -> dict[str, float | PreferenceScores]:
    """Read a checkpoint's scores of further validation sets; null is an infinity."""
    kinds = (float, dict, type(None))
    if not isinstance(saved, dict) or not all(type(score) in kinds for score in saved.values()):
        raise CheckpointError(f"checkpoint: validation sets {saved!r:.80}, expected perplexities; use an older one")
    return {
        str(name): read_preference_scores(value) if isinstance(value, dict) else math.inf if value is None else value
        for name, value in saved.items()
    }


def describe_texts(texts: LabelledTexts, task: str, seed: int) -> dict[str, Any]:
    """Describe a task for the summary: its texts, and how far one comes without a model.

    TF-IDF with logistic regression is given whole texts of all clients together; its figures are null where
    scikit-learn is not installed.
    """
    train, test = texts.shares.train_examples, texts.shares.test
    return {
        "task": task,
        "classes": len(texts.classes),
        "train_texts": len(train),
        "test_texts": len(test),
        "classes_by_client": {name: len(set(client.rows.classes)) for name, client in texts.clients.items()},
        "majority_accuracy": majority_share(train, test),
        **_tfidf_baseline(texts, seed),
    }


def _tfidf_baseline(texts: LabelledTexts, seed: int) -> dict[str, float | None]:
    train, test = texts.shares.train_examples, texts.shares.test
    if len({example.label for example in train}) < _FEWEST:
        return {"tfidf_accuracy": None, "tfidf_macro_f1": None}
    try:
        predicted = tfidf_predictions(train, test, seed)
    except DataError:
        return {"tfidf_accuracy": None, "tfidf_macro_f1": None}
    confusion = ConfusionMatrix.count_answers(predicted, [example.label for example in test], len(texts.classes))
    return {"tfidf_accuracy": confusion.accuracy, "tfidf_macro_f1": confusion.macro_f1}
