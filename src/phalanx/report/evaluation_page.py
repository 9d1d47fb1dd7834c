"""The page of an evaluation: figures with their intervals, a comparison, and texts that the model wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.evaluate.evaluation import EvaluationResult, SuiteResult, figure_rows, provenance_rows, shown_samples
from phalanx.evaluate.measures import metric_of
from phalanx.report.figures import short_text
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import Attributes, Markup, make_element
from phalanx.report.tables import make_table

_WIDTH, _ROW = 720.0, 26.0
_LEFT, _RIGHT = 260.0, 700.0
_FIGURES = "Each with its 95 % interval, by the method that suits it; n counts samples, tokens or bytes."


def write_evaluation_page(path: Path, result: EvaluationResult, comparison: Sequence[Mapping[str, str]] = ()) -> Path:
    """Write the page of a result."""
    return write_page(path, render_evaluation_page(result, comparison))


def render_evaluation_page(result: EvaluationResult, comparison: Sequence[Mapping[str, str]] = ()) -> str:
    """Return the whole page; nothing of a model's text is markup."""
    head = make_element(
        "header",
        {},
        make_element("p", {"class": "run"}, "Evaluation"),
        make_element("h1", {}, short_text(result.subject, 80)),
    )
    parts = [head, make_section("Figures", _FIGURES, _row_table(figure_rows(result)))]
    if comparison:
        remark = "The same rows for both models; a difference below the smallest visible one proves nothing."
        parts.append(make_section("Comparison", remark, _row_table(comparison)))
    parts += [section for suite in result.suites if (section := _suite_section(suite)) is not None]
    parts.append(
        make_section("Made of", "Equal digests and seed give equal figures.", _row_table(provenance_rows(result)))
    )
    return page_shell(f"Evaluation {short_text(result.subject, 80)}", parts)


def _suite_section(suite: SuiteResult) -> Markup | None:
    drawn, written = _draw_shares(suite), shown_samples(suite)
    notes = [make_element("p", {"class": "remark"}, short_text(note, 300)) for note in suite.notes]
    if written:
        notes.append(_row_table(written))
    if drawn is None and not notes:
        return None
    return make_section(short_text(suite.name, 60), "", *([drawn] if drawn is not None else []), *notes)


def _draw_shares(suite: SuiteResult) -> Markup | None:
    shares = [
        figure
        for figure in suite.figures
        if metric_of(figure.metric).form == "mean" and figure.value is not None and 0 <= figure.value <= 1
    ]
    if len(shares) < 2:
        return None
    height = _ROW * (len(shares) + 1)
    shapes = []
    for step in range(5):
        x = _place(step / 4)
        shapes.append(make_element("line", {"class": "grid", "x1": x, "x2": x, "y1": 0.0, "y2": height - _ROW}))
        shapes.append(make_element("text", {"class": "tick middle", "x": x, "y": height - 8}, f"{step / 4:g}"))
    for number, figure in enumerate(shares):
        y = _ROW * (number + 0.5)
        shapes.append(make_element("text", {"class": "tick", "x": 0.0, "y": y + 4}, short_text(figure.metric, 40)))
        if figure.low is not None and figure.high is not None:
            ends = {"x1": _place(max(0.0, figure.low)), "x2": _place(min(1.0, figure.high)), "y1": y, "y2": y}
            shapes.append(make_element("line", {"class": "k0", **ends}))
        shapes.append(make_element("circle", {"class": "f0", "cx": _place(figure.value or 0.0), "cy": y, "r": 4.0}))
    attributes: Attributes = {
        "class": "chart",
        "viewBox": f"0 0 {_WIDTH:g} {height:g}",
        "width": _WIDTH,
        "height": height,
        "role": "img",
    }
    return make_element("svg", {**attributes, "aria-label": f"Shares of {suite.name} with intervals"}, *shapes)


def _place(share: float) -> float:
    return _LEFT + share * (_RIGHT - _LEFT)


def _row_table(rows: Sequence[Mapping[str, str]]) -> Markup:
    names = list(rows[0])
    return make_table(names, [[row[name] for name in names] for row in rows], "figures")
