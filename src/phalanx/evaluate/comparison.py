"""Two results on the same rows: a paired test for each figure, and the smallest difference that so many rows show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import DataError
from phalanx.evaluate.evaluation import EvaluationResult, SampleRecord, SuiteResult
from phalanx.evaluate.intervals import PairedTest, paired_test
from phalanx.evaluate.measures import metric_of


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of two models.

    Attributes:
        test: The paired test; None where samples cannot be paired, and then `reason` says why.
    """

    name: str
    first: float | None
    second: float | None
    test: PairedTest | None
    reason: str = ""


def compare_results(first: EvaluationResult, second: EvaluationResult) -> list[ComparedFigure]:
    """Compare figure by figure; a difference is the first minus the second, in nats for a perplexity.

    Raises:
        DataError: They share no suite, or a suite, its data or the seed differ.
    """
    others = {suite.name: suite for suite in second.suites}
    shared = [(suite, others[suite.name]) for suite in first.suites if suite.name in others]
    if not shared:
        raise DataError("the two results share no suite; evaluate both on the same ones")
    if first.seed != second.seed:
        raise DataError(f"seeds {first.seed} and {second.seed} differ; draws are not the same; use one seed")
    compared = []
    for suite, other in shared:
        if (suite.suite_digest, suite.data_digest) != (other.suite_digest, other.data_digest):
            raise DataError(
                f"suite {suite.name}: its rows differ between the two results; evaluate both on the same ones"
            )
        compared += _compare_suite(suite, other, first.seed)
    return compared


def _compare_suite(suite: SuiteResult, other: SuiteResult, seed: int) -> list[ComparedFigure]:
    values = {figure.metric: figure.value for figure in other.figures}
    compared = []
    for figure in suite.figures:
        if figure.metric not in values:
            continue
        mine, theirs = _samples_of(suite, figure.metric), _samples_of(other, figure.metric)
        test, reason = _pair_samples(figure.metric, mine, theirs, seed)
        compared.append(
            ComparedFigure(f"{suite.name}.{figure.metric}", figure.value, values[figure.metric], test, reason)
        )
    return compared


def _pair_samples(
    metric: str, mine: Sequence[SampleRecord], theirs: Sequence[SampleRecord], seed: int
) -> tuple[PairedTest | None, str]:
    form = metric_of(metric).form
    if form == "calibration":
        return None, "a calibration error is no mean of rows"
    by_id = {sample.id: sample for sample in theirs}
    if {sample.id for sample in mine} != set(by_id) or len(mine) != len(theirs):
        return None, "measured on other rows"
    pairs = [(by_id[sample.id], sample) for sample in sorted(mine, key=lambda sample: sample.id)]
    weights = [ours.weight for _, ours in pairs]
    if any(their.weight != ours.weight for their, ours in pairs):
        return None, "the vocabularies cut the texts differently; compare bits_per_byte"
    clusters = [ours.cluster for _, ours in pairs]
    before, after = [their.value for their, _ in pairs], [ours.value for _, ours in pairs]
    return paired_test(before, after, clusters, seed, weights=() if form == "mean" else weights), ""


def _samples_of(suite: SuiteResult, metric: str) -> list[SampleRecord]:
    return [sample for sample in suite.samples if sample.metric == metric]


def comparison_rows(compared: Sequence[ComparedFigure]) -> list[dict[str, str]]:
    """Return the comparison as rows of texts for a table."""
    return [_comparison_row(figure) for figure in compared]


def _comparison_row(figure: ComparedFigure) -> dict[str, str]:
    row = {"figure": figure.name, "this": _number(figure.first), "other": _number(figure.second)}
    test = figure.test
    if test is None:
        return row | {"difference": "-", "95 % interval": "-", "p": "-", "smallest visible": "-", "test": figure.reason}
    interval = "-" if test.low is None or test.high is None else f"{test.low:+.4g} to {test.high:+.4g}"
    shown = {"difference": f"{test.difference:+.4g}", "95 % interval": interval, "p": f"{test.p:.3g}"}
    return row | shown | {"smallest visible": _number(test.smallest), "test": f"{test.test}, n = {test.n}"}


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"
