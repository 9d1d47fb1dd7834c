"""An evaluation: suites by one scorer, figures with intervals, and the file that holds them with every sample."""

import html
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json, parse_strict_json, printable_text
from phalanx.errors import ConfigError, DataError, VerificationError
from phalanx.evaluate.intervals import Interval, calibration_interval, mean_interval, ratio_interval
from phalanx.evaluate.measures import METRICS, Metric, Sample, SuiteSamples, measure_suite, metric_of
from phalanx.evaluate.scorer import Progress, Scorer, ignore_progress
from phalanx.evaluate.suite import Suite

FORMAT = "phalanx-evaluation/1"
MAX_RESULT_BYTES = 1 << 30
_MAX_EXPONENT = 700.0
_SHOWN_CHARACTERS = 200


class SampleRecord(StrictModel):
    """A sample in the file; `shown` is the text of the model, unchanged."""

    id: str
    cluster: str
    metric: str
    value: float
    weight: float = 1.0
    shown: str = ""


class FigureRecord(StrictModel):
    """A figure with its 95 % interval.

    Attributes:
        value: A finite number, or None.
        n: Samples; of a perplexity tokens, of bits per byte bytes.
        clusters: Groups of samples that are independent of each other.
    """

    metric: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    method: str


class SuiteResult(StrictModel):
    """All about one suite."""

    name: str
    kind: str
    version: int
    suite_digest: str
    data_digest: str | None = None
    num_rows: int
    notes: tuple[str, ...] = ()
    figures: tuple[FigureRecord, ...]
    samples: tuple[SampleRecord, ...] = ()


class EvaluationResult(StrictModel):
    """The result of an evaluation.

    Attributes:
        model: Digests of weights and template, window and kind, by the scorer.
        subject: The path or address as the user gave it.
        versions: Versions of the libraries that decide figures.
    """

    format: Literal["phalanx-evaluation/1"] = "phalanx-evaluation/1"
    subject: str
    model: dict[str, Any]
    seed: int = Field(ge=0)
    versions: dict[str, str]
    suites: tuple[SuiteResult, ...]

    @property
    def figures(self) -> dict[str, FigureRecord]:
        """Every figure by ``suite.metric``."""
        return {f"{suite.name}.{figure.metric}": figure for suite in self.suites for figure in suite.figures}

    @property
    def brief_figures(self) -> dict[str, dict[str, float | int | None]]:
        """Value, interval and n of every figure by ``suite.metric``."""
        return {
            name: {"value": figure.value, "low": figure.low, "high": figure.high, "n": figure.n}
            for name, figure in self.figures.items()
        }

    def without_samples(self) -> dict[str, Any]:
        """Return the result as JSON has it, without samples."""
        return self.model_dump(mode="json", exclude={"suites": {"__all__": {"samples"}}})


ShowSuite = Callable[[str], AbstractContextManager[Progress]]
"""Opens the progress display of a suite, by its name."""


def show_nothing(_name: str) -> AbstractContextManager[Progress]:
    """Show no progress."""
    return nullcontext(ignore_progress)


def run_suites(
    subject: str,
    scorer: Scorer,
    suites: Sequence[Suite],
    seed: int,
    show: ShowSuite = show_nothing,
) -> EvaluationResult:
    """Measure suites.

    Args:
        subject: Name of the model in the result.
        seed: Decides draws, disturbances and resamples.

    Raises:
        DataError: The scorer lacks a capability that a suite needs, or a row does not fit.
        ModelError: A log-probability is no finite number.
    """
    names = [suite.name for suite in suites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"suite {twice}: is named twice; remove one")
    results = []
    for suite in suites:
        with show(suite.name) as tell:
            results.append(summarize_suite(suite, measure_suite(suite, scorer, seed, tell), seed))
    return EvaluationResult(
        subject=subject,
        model=scorer.describe_model(),
        seed=seed,
        versions=library_versions(),
        suites=tuple(results),
    )


def summarize_suite(suite: Suite, measured: SuiteSamples, seed: int) -> SuiteResult:
    """Make figures of samples."""
    return SuiteResult(
        name=suite.name,
        kind=suite.kind,
        version=suite.version,
        suite_digest=suite.digest,
        data_digest=suite.data_digest,
        num_rows=len(suite.rows),
        notes=measured.notes,
        figures=make_figures(measured.samples, seed, metric_of),
        samples=tuple(SampleRecord(**vars(sample)) for sample in measured.samples),
    )


def make_figures(
    samples: Sequence[Sample], seed: int, metric: Callable[[str], Metric] = metric_of
) -> tuple[FigureRecord, ...]:
    """Return a figure for each metric, in the order of its first sample."""
    by_metric: dict[str, list[Sample]] = {}
    for sample in samples:
        by_metric.setdefault(sample.metric, []).append(sample)
    return tuple(_make_figure(name, metric(name), group, seed) for name, group in by_metric.items())


def _make_figure(name: str, metric: Metric, samples: Sequence[Sample], seed: int) -> FigureRecord:
    values, weights = [sample.value for sample in samples], [sample.weight for sample in samples]
    clusters = [sample.cluster for sample in samples]
    interval: Interval
    if metric.form == "calibration":
        interval = calibration_interval(weights, values, seed)
    elif metric.form == "mean":
        interval = mean_interval(values, clusters, seed)
    else:
        interval = ratio_interval(values, weights, clusters, seed)
    numbers = [interval.value, interval.low, interval.high]
    if metric.form == "exp_ratio":
        numbers = [None if number is None or number > _MAX_EXPONENT else math.exp(number) for number in numbers]
    value, low, high = (None if number is None or not math.isfinite(number) else number for number in numbers)
    return FigureRecord(
        metric=name, value=value, low=low, high=high, n=interval.n, clusters=interval.clusters, method=interval.method
    )


def library_versions() -> dict[str, str]:
    """Return the versions of what decides figures."""
    names = ("torch", "transformers", "tokenizers", "numpy")
    return {"phalanx": metadata.version("phalanx-train"), "python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def result_text(result: EvaluationResult) -> str:
    """Return a result with its samples as JSON, in one way only."""
    return canonical_json(result.model_dump(mode="json")).decode() + "\n"


def read_result(path: Path) -> EvaluationResult:
    """Read a result, which may be another party's."""
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise DataError(f"{path}: is larger than {MAX_RESULT_BYTES} bytes; evaluate the model again")
        return EvaluationResult.model_validate(parse_strict_json(path.read_bytes()), strict=False)
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); give the file of phalanx eval --out") from exc
    except (ValidationError, ValueError, RecursionError) as exc:
        reason = f"{exc.errors()[0]['loc']}: {exc.errors()[0]['msg']}" if isinstance(exc, ValidationError) else str(exc)
        raise DataError(f"{path}: is no result of phalanx eval ({reason:.200})") from exc


def parse_gates(
    gates: Sequence[str], option: str, form: str = "suite.metric=number, such as facts.accuracy=0.4"
) -> dict[str, float]:
    """Read gates ``name=number``; where the form has a dot before the equals sign, a name has one.

    Raises:
        ConfigError: One has another form or no finite number, or a name is given twice.
    """
    limits: dict[str, float] = {}
    for text in gates:
        name, _, number = text.rpartition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not name or ("." in form.partition("=")[0] and "." not in name) or not math.isfinite(limit):
            raise ConfigError(f"{option} {text!r:.80}: expected {form}")
        if name in limits:
            raise ConfigError(f"{option} {name}: is given twice; leave one of the two")
        limits[name] = limit
    return limits


def gate_error(
    result: EvaluationResult, below: Mapping[str, float], above: Mapping[str, float]
) -> VerificationError | None:
    """Return the error of the first gate that a result fails; a figure that is not there, or no number, fails it."""
    for limits, word in ((below, "below"), (above, "above")):
        for name, limit in limits.items():
            figure = result.figures.get(name)
            value = None if figure is None else figure.value
            if value is not None and (value >= limit if word == "below" else value <= limit):
                continue
            shown = "not measured" if value is None else f"{value:.6g}, {word} {limit:g}"
            return VerificationError(f"gate {name}: {shown}; the model does not pass").with_facts(
                code="PHX-V160", key=name, found=str(value), expected=f"not {word} {limit:g}", do="do not release it"
            )
    return None


def figure_rows(result: EvaluationResult) -> list[dict[str, str]]:
    """Return the figures as rows of texts for a table."""
    rows = []
    for suite in result.suites:
        for figure in suite.figures:
            interval = "-" if figure.low is None or figure.high is None else f"{figure.low:.4g} to {figure.high:.4g}"
            row = {
                "suite": suite.name,
                "metric": figure.metric,
                "value": "-" if figure.value is None else f"{figure.value:.4g}",
            }
            rows.append(row | {"95 % interval": interval, "n": f"{figure.n:,}", "clusters": f"{figure.clusters:,}"})
    return rows


def provenance_rows(result: EvaluationResult) -> list[dict[str, str]]:
    """Return digests, seed and versions behind the figures, as rows of texts."""
    facts = {"model": result.subject, **{name: str(value) for name, value in result.model.items()}}
    facts["seed"] = str(result.seed)
    facts |= {f"suite {suite.name}": f"version {suite.version}, {suite.suite_digest}" for suite in result.suites}
    facts |= {f"data of {suite.name}": suite.data_digest for suite in result.suites if suite.data_digest}
    facts |= result.versions
    return [{"what": name, "value": printable_text(value, _SHOWN_CHARACTERS)} for name, value in facts.items()]


def shown_samples(suite: SuiteResult, limit: int = 5) -> list[dict[str, str]]:
    """Return some texts that the model wrote, harmless to show, failures of the model first."""
    metric = metric_of(suite.samples[0].metric) if suite.samples else METRICS["accuracy"]
    written = [sample for sample in suite.samples if sample.shown]
    written.sort(key=lambda sample: sample.value if metric.is_better == "higher" else -sample.value)
    return [
        {
            "id": printable_text(sample.id, 60),
            "metric": printable_text(sample.metric, 60),
            "value": f"{sample.value:g}",
            "text": printable_text(sample.shown, _SHOWN_CHARACTERS),
        }
        for sample in written[:limit]
    ]


def render_markdown(result: EvaluationResult, comparison: Sequence[Mapping[str, str]] = ()) -> str:
    """Return the result as Markdown; whatever a model or a path holds is text in a cell."""
    parts = ["# Evaluation", _markdown_table(figure_rows(result))]
    if comparison:
        parts += ["## Comparison", _markdown_table(comparison)]
    for suite in result.suites:
        notes = [f"- {_cell(note)}" for note in suite.notes]
        written = shown_samples(suite)
        if notes or written:
            parts += [f"## {suite.name}", *(["\n".join(notes)] if notes else [])]
            parts += [_markdown_table(written)] if written else []
    return "\n\n".join([*parts, "## Made of", _markdown_table(provenance_rows(result))]) + "\n"


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    plain = html.escape(printable_text(text, 1000), quote=False)
    return "".join(f"\\{character}" if character in "\\`*_[]|!#" else character for character in plain)
