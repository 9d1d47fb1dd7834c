"""The losses of several runs in one picture, for a README."""

from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import InputError
from phalanx.report.loss import curve_of, loss_chart
from phalanx.report.markup import Attributes, Markup, element
from phalanx.report.read import read_run
from phalanx.report.svg import PlotFrame, style_sheet

# the guarded run lies exactly on the clean one: a wide pale line below, a narrow dark one on top
_COLOURS = (2, 5, 0, 3, 1, 4, 6)


def write_curve_svg(run_dirs: Mapping[str, Path], out: Path) -> Path:
    """Draw the training losses of several runs, attacked steps marked, as one SVG file.

    Args:
        run_dirs: Run directories by the name that the legend shows; drawn in order, the last on top.
        out: Where the picture goes.

    Returns:
        `out`.

    Raises:
        InputError: More than seven runs, a run without a finite loss, or `out` cannot be written.
    """
    if not 1 <= len(run_dirs) <= len(_COLOURS):
        raise InputError(f"{out}: {len(run_dirs)} runs to draw, expected 1 to {len(_COLOURS)}")
    curves = [
        curve_of(read_run(path).metrics, label, colour)
        for (label, path), colour in zip(run_dirs.items(), _COLOURS, strict=False)
    ]
    for curve, path in zip(curves, run_dirs.values(), strict=True):
        if not any(value is not None for _, value in curve.loss):
            raise InputError(f"{path / 'metrics.jsonl'}: has no finite loss; train first, or leave the run out")
    frame = PlotFrame(height=360.0, right=24.0)
    drawn = loss_chart(frame, curves, hovers=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_standalone(frame, drawn or Markup("")), encoding="utf-8")
    except OSError as exc:
        raise InputError(f"{out}: cannot be written ({exc.strerror}); free or allow it") from exc
    return out


def _standalone(frame: PlotFrame, drawn: Markup) -> str:
    # a card of its own, because the page around it may be light while the reader prefers dark
    outer: Attributes = {"viewBox": f"0 0 {frame.width:.0f} {frame.height:.0f}", "width": frame.width}
    card: Attributes = {"class": "paper", "width": frame.width, "height": frame.height, "rx": 10}
    ground = element("g", {"class": "chart"}, element("rect", card))
    root: Attributes = {"xmlns": "http://www.w3.org/2000/svg", **outer, "height": frame.height}
    return element("svg", root, style_sheet("chart.css"), ground, drawn)
