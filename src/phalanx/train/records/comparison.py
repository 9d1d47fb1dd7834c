"""The comparison of a model's held-out results before and after training."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.scores import Scores, loss_of


@dataclass(frozen=True)
class HeldOutMeasure:
    """One figure of the untouched model and of the final one.

    Attributes:
        first: Before training; None where it was not measured.
    """

    name: str
    first: float | None
    last: float | None
    is_better_low: bool = True

    @property
    def is_worse(self) -> bool:
        """Whether the final model is worse by this figure, as far as four digits show it; None tells nothing."""
        if self.first is None or self.last is None or not math.isfinite(self.first):
            return False
        if not math.isfinite(self.last):
            return True
        moved = self.last - self.first
        return (moved > 0) is self.is_better_low and _format_figure(self.first) != _format_figure(self.last)

    def __str__(self) -> str:
        return f"{self.name} {_format_figure(self.first)} -> {_format_figure(self.last)}"


def measures_of_scores(
    first: Scores | PreferenceScores | None, last: Scores | PreferenceScores | None
) -> list[HeldOutMeasure]:
    """Return what held-out rows with classes, or pairs, are compared by."""
    if isinstance(first, Scores) and isinstance(last, Scores):
        return [
            HeldOutMeasure("held-out accuracy", first.accuracy, last.accuracy, is_better_low=False),
            HeldOutMeasure("held-out loss", first.loss, last.loss),
        ]
    if isinstance(first, PreferenceScores) and isinstance(last, PreferenceScores):
        return [
            HeldOutMeasure("accuracy on held-out pairs", first.accuracy, last.accuracy, is_better_low=False),
            HeldOutMeasure("loss of a held-out pair", first.loss, last.loss),
        ]
    return []


def measures_of_perplexity(name: str, first: float | None, last: float | None) -> list[HeldOutMeasure]:
    """Return what held-out text is compared by."""
    before, after = (None if value is None else loss_of(value) for value in (first, last))
    return [HeldOutMeasure(name, before, after)]


def worse_figures(measures: Iterable[HeldOutMeasure]) -> list[str]:
    """Return by which figures the final model is worse than the untouched one, in words."""
    return [str(measure) for measure in measures if measure.is_worse]


def describe_worse(summary: Mapping[str, Any]) -> list[str]:
    """Return a warning if the model is worse after the run than before, by the measured rows; else no line."""
    worse = summary.get("worse_than_before")
    if not worse:
        return []
    noise = "; the noise of its privacy is a possible cause" if "privacy" in summary else ""
    return [f"WORSE THAN BEFORE: {', '.join(worse)}. The model before training is better on held-out rows{noise}"]


def _format_figure(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4g}" if math.isfinite(value) else "not a finite number"
