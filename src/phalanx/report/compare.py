"""Runs side by side: what their files differ in, their curves, their figures, and which differences exceed noise."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import InputError
from phalanx.evaluate.intervals import difference_by_chance, student_quantile
from phalanx.report.figures import format_amount, parse_number, short_text
from phalanx.report.loss import curve_of, loss_chart
from phalanx.report.read import RunRecord, read_run
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import Markup, PlotFrame, make_element
from phalanx.report.tables import make_table

MAX_RUNS = 6
_COLOURS = (2, 5, 0, 3, 1, 4)
_SEED = "train.seed"
_BLOCKS, _MIN_BLOCK, _TAIL = 8, 4, 0.25
_SHOWN = (
    *("status", "steps", "tokens", "loss_last", "validation_perplexity", "tokens_per_s", "wall_s", "audits"),
    *("steps_redone", "batches_skipped", "steps_lost"),
)
_NESTED = ("validation_sets", "classification", "preferences", "evaluation", "privacy")
_QUALITY = ("loss", "perplexity", "accuracy", "reward", "margin")
_MAX_ROWS = 400


@dataclass(frozen=True)
class FigureDifference:
    """One figure of a run beside that of the first one.

    Attributes:
        noise: Difference that chance alone makes in about one of twenty comparisons; None where it is not known.
        basis: Runs or steps that the noise was taken from, in words.
    """

    figure: str
    run: str
    difference: float
    noise: float | None
    basis: str

    @property
    def verdict(self) -> str:
        """Whether the difference exceeds noise, in words."""
        if self.noise is None:
            return "noise not known"
        return "exceeds noise" if abs(self.difference) > self.noise else "within noise"


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side; the first one is what others are compared with.

    Attributes:
        settings: Keys of the run file in which they differ, with the value of each run; None where it has none.
        figures: Figures of each run by name.
    """

    names: tuple[str, ...]
    records: tuple[RunRecord, ...]
    settings: dict[str, tuple[Any, ...]]
    figures: dict[str, tuple[Any, ...]]
    differences: tuple[FigureDifference, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data, without the curves."""
        differences = [{**asdict(row), "verdict": row.verdict} for row in self.differences]
        return {"runs": self.names, "settings": self.settings, "figures": self.figures, "differences": differences}


def compare_runs(run_dirs: Sequence[Path]) -> RunComparison:
    """Compare runs with the first of them.

    Noise of a validation figure is known from runs of one run file with several seeds among them
    (the standard error from their pooled spread, times Student's t). That of the training loss is known for runs that
    saw the same batches: that of the mean difference over the last quarter, from the spread of blocks of steps.
    It says that the curves differ, and not that another seed would show it too.
    """
    if not 2 <= len(run_dirs) <= MAX_RUNS:
        raise InputError(f"{len(run_dirs)} runs to compare; give 2 to {MAX_RUNS} run directories")
    records = tuple(read_run(path) for path in run_dirs)
    names = _name_runs(run_dirs)
    flat = [dict(_flatten(record.config)) for record in records]
    keys = sorted({key for settings in flat for key in settings})
    settings = {
        key: values
        for key in keys
        if len(set(map(repr, values := tuple(settings_of_run.get(key) for settings_of_run in flat)))) > 1
    }
    figures = [_figures_of(record) for record in records]
    shown = list(dict.fromkeys(key for row in figures for key in row))[:_MAX_ROWS]
    table = {key: tuple(row.get(key) for row in figures) for key in shown}
    groups = _group_by_settings(flat)
    differences = [
        row
        for number in range(1, len(records))
        for row in (
            _training_difference(records[0], records[number], names[number]),
            *_quality(table, groups, number, names),
        )
        if row is not None
    ]
    return RunComparison(names, records, settings, table, tuple(differences))


def write_comparison(comparison: RunComparison, out: Path) -> Path:
    """Write a comparison as one page that opens offline."""
    names = comparison.names
    frame = PlotFrame(height=360.0, right=24.0)
    curves = [
        curve_of(record.metrics, name, colour)
        for record, name, colour in zip(comparison.records, names, _COLOURS, strict=False)
    ]
    training = loss_chart(frame, [curve for curve in curves if curve.loss] or curves)
    # a held-out curve is drawn as the loss of a run that has nothing else
    held_out = [
        curve_of([{"step": step, "loss": value} for step, value in curve.validation], curve.label, curve.colour)
        for curve in curves
        if curve.validation
    ]
    validation = loss_chart(frame, held_out) if held_out else None
    nothing = make_element("p", {}, "No finite loss was recorded.")
    rows = [
        [row.figure, row.run, f"{row.difference:+.4g}", format_amount(row.noise), row.verdict, row.basis]
        for row in comparison.differences
    ]
    heads = ["Figure", "Run", "Difference", "Noise", "Verdict", "Noise from"]
    sections: list[Markup] = [
        make_element(
            "header", {}, make_element("h1", {}, "Runs side by side"), make_element("p", {}, ", ".join(names))
        ),
        make_section("Training loss", "Steps from 0.", training or nothing),
        *([make_section("Validation loss", "Of the held-out rows.", validation)] if validation else []),
        make_section("Differences", f"Against {names[0]}.", make_table(heads, rows, "figures")),
        make_section("Figures", "", _side_by_side("Figure", names, comparison.figures)),
        make_section("Settings that differ", "", _side_by_side("Key", names, comparison.settings)),
    ]
    return write_page(out, page_shell("Runs side by side", sections))


def _side_by_side(head: str, names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> Markup:
    cells = [[key, *("" if value is None else short_text(value, 120) for value in row)] for key, row in rows.items()]
    return make_table([head, *names], cells, "figures")


def _name_runs(run_dirs: Sequence[Path]) -> tuple[str, ...]:
    """Return the names of directories, with as much of their paths as tells them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = tuple("/".join(part[-depth:]) for part in parts)
        if len(set(names)) == len(names):
            return names
    raise InputError("a run was given twice; compare it with another one")


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}".removeprefix("."))
    else:
        yield name, json.dumps(value, default=str) if isinstance(value, list) else value


def _figures_of(record: RunRecord) -> dict[str, Any]:
    summary = record.summary
    flat = {name: summary[name] for name in _SHOWN if summary.get(name) is not None}
    for section in _NESTED:
        for key, value in _flatten(summary.get(section) or {}, section):
            if isinstance(value, int | float | str) and not key.endswith("_first"):
                flat[key] = value
    return flat


def _group_by_settings(flat: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of each run's group; runs of a group differ in their seed alone."""
    texts = [repr(sorted((key, repr(value)) for key, value in row.items() if key != _SEED)) for row in flat]
    return [texts.index(text) for text in texts]


def _quality(
    table: Mapping[str, Sequence[Any]], groups: Sequence[int], number: int, names: Sequence[str]
) -> Iterator[FigureDifference]:
    """Yield the differences of one run's held-out figures, with the spread over seeds where there is one."""
    if groups[number] == groups[0]:
        return
    for figure, values in table.items():
        if not any(word in figure for word in _QUALITY) or figure == "loss_last":
            continue
        numbers = [parse_number(value) for value in values]
        if figure.endswith("perplexity"):
            numbers = [math.log(value) if value is not None and value > 0 else None for value in numbers]
        sides = [
            [value for group, value in zip(groups, numbers, strict=True) if group == side_group and value is not None]
            for side_group in (groups[0], groups[number])
        ]
        if not all(sides):
            continue
        noise = difference_by_chance(sides)
        is_known = noise is not None
        basis = f"{len(sides[0])} and {len(sides[1])} seeds" if is_known else "one seed each: train with others"
        shown = f"log of {figure}" if figure.endswith("perplexity") else figure
        difference = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
        yield FigureDifference(shown, names[number], difference, noise, basis)


def _training_difference(first: RunRecord, other: RunRecord, name: str) -> FigureDifference | None:
    """Return the difference of the training losses over the last quarter of the steps that both have."""
    rows = [{int(row["step"]): row for row in record.metrics} for record in (first, other)]
    steps = sorted(rows[0].keys() & rows[1].keys())
    steps = steps[-max(1, int(len(steps) * _TAIL)) :]
    pairs = [(parse_number(rows[0][step].get("loss")), parse_number(rows[1][step].get("loss"))) for step in steps]
    moved = [b - a for a, b in pairs if a is not None and b is not None]
    if not moved:
        return None
    block = len(moved) // _BLOCKS
    is_paired = all(
        _sample(rows[0][step]) is not None and _sample(rows[0][step]) == _sample(rows[1][step]) for step in steps
    )
    noise = None
    if is_paired and block >= _MIN_BLOCK:
        # neighbouring steps have nearly the same weights; blocks of them are nearly independent
        means = [statistics.fmean(moved[start * block : (start + 1) * block]) for start in range(_BLOCKS)]
        noise = student_quantile(_BLOCKS - 1) * math.sqrt(statistics.variance(means) / _BLOCKS)
    basis = (
        f"{_BLOCKS} blocks of {block} steps" if noise is not None else "other batches" if not is_paired else "few steps"
    )
    return FigureDifference("training loss, last quarter", name, statistics.fmean(moved), noise, basis)


def _sample(row: Mapping[str, Any]) -> Any:
    return row.get("samples_digest")
