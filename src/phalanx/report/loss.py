"""The loss of one or several runs over their steps, with the attacked steps marked."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import InputError, writing_cure
from phalanx.report.figures import format_amount, parse_number, short_text
from phalanx.report.read import read_run
from phalanx.report.svg import (
    AxisScale,
    Markup,
    PlotFrame,
    Shape,
    draw_axes,
    draw_legend,
    draw_line,
    draw_mark,
    draw_picture,
    draw_text,
    hover_band,
    join_markup,
    make_element,
    standalone_svg,
)

# more signs than this hide the curve; then only the rug below it is drawn
_MAX_MARKS = 40
_MAX_BANDS = 240
_SMOOTH_FROM = 60
# without the colours of the training and of attacks
_SET_COLOURS = (1, 2, 3, 4, 6)
_MAX_SETS = 6

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Curve:
    """One run's losses in nats.

    Attributes:
        colour: Number of one of the 7 colours.
        loss: Training loss by step; None where it was not finite.
        validation: Validation loss by step; drawn when the curve is the only one.
        attacked: Steps that were attacked, and whether each was repaired before it was used.
        per: Unit of a loss: a token, or a text.
        named: Loss on each further validation set by step; drawn when the curve is the only one.
    """

    label: str
    colour: int
    loss: list[Point]
    validation: list[Point]
    attacked: dict[float, bool]
    per: str = "token"
    named: Mapping[str, list[Point]] = field(default_factory=dict)

    @property
    def held_out(self) -> dict[str, list[Point]]:
        """Every validation curve by the name that the legend shows."""
        curves = {"validation": self.validation} if self.validation else {}
        return {**curves, **self.named}


def curve_of(rows: Iterable[dict[str, Any]], label: str, colour: int = 0) -> Curve:
    """Take the losses from the rows of a metrics file."""
    loss: list[Point] = []
    validation: list[Point] = []
    attacked: dict[float, bool] = {}
    named: dict[str, list[Point]] = {}
    per = "token"
    for row in rows:
        step = parse_number(row.get("step"))
        if step is None:
            continue
        loss.append((step, parse_number(row.get("loss"))))
        perplexity = parse_number(row.get("validation_perplexity"))
        if perplexity is not None and perplexity > 0:
            validation.append((step, math.log(perplexity)))
        elif (held_out := parse_number(row.get("validation_loss"))) is not None:
            # of a classification
            validation.append((step, held_out))
            per = "text"
        for name, named_loss in _named_losses(row):
            named.setdefault(name, []).append((step, named_loss))
        if row.get("attacked") is True or row.get("repaired") is True:
            attacked[step] = row.get("repaired") is True
    shown = dict(itertools.islice(named.items(), _MAX_SETS))
    return Curve(label, colour, loss, validation, attacked, per, shown)


def _named_losses(row: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    sets = row.get("validation_sets")
    for name, figures in sets.items() if isinstance(sets, dict) else ():
        if isinstance(figures, dict):
            yield short_text(name, 40), parse_number(figures.get("loss"))


def loss_chart(
    frame: PlotFrame, curves: Sequence[Curve], levels: Sequence[tuple[str, float]] = (), *, hovers: bool = True
) -> Markup | None:
    """Draw the curves; None when there is not one finite loss.

    Args:
        curves: At least one; drawn in order, the last on top.
        levels: Named losses to compare with, drawn as dashed lines.
        hovers: Show the figures of a step under the pointer.
    """
    single = [point for entry in curves[0].held_out.values() for point in entry] if len(curves) == 1 else []
    points = [point for curve in curves for point in curve.loss] + single
    shown = [value for _, value in points if value is not None]
    steps = [step for curve in curves for step, _ in curve.loss]
    if not shown:
        return None
    # a level far away would flatten the curves
    near = [level for level in levels if level[1] <= 2.5 * max(shown)]
    y = _loss_scale(shown + [value for _, value in near], frame)
    x = AxisScale(min(steps), max(steps), frame.x_range)
    unit = f"nats a {curves[0].per}" + (", log scale" if y.log else "")
    parts: list[str] = [draw_axes(frame, x, y, "step", f"loss ({unit})")]
    for row, curve in enumerate(curves):
        # equal runs lie on each other: the first is a wide pale band that shows below the others
        parts.append(_training_line(x, y, curve, wide=row == 0 and len(curves) > 1))
        if len(curves) == 1:
            parts.append(_validation_line(x, y, curve))
    for name, value in near:
        parts.append(_level_line(frame, y, name, value))
    for row, curve in enumerate(curves):
        parts.append(_attack_marks(frame, x, y, curve, row))
    parts.append(draw_legend(frame, _legend_items(curves)))
    if hovers:
        parts.append(_hover_bands(frame, x, curves))
    names = ", ".join(curve.label for curve in curves)
    return draw_picture(frame, f"Loss over {len(set(steps))} steps: {names}", *parts)


def smooth_points(points: Sequence[Point], radius: int) -> list[Point]:
    """Return the mean of each point and its neighbours; a missing value stays a gap."""
    result: list[Point] = []
    for index, (step, value) in enumerate(points):
        window = points[max(0, index - radius) : index + radius + 1]
        values = [other for _, other in window if other is not None]
        result.append((step, None if value is None else sum(values) / len(values)))
    return result


def _loss_scale(values: Sequence[float], frame: PlotFrame) -> AxisScale:
    low, high = min(values), max(values)
    if low > 0 and high > 12 * low:
        return AxisScale(low / 1.15, high * 1.15, frame.y_range, log=True)
    pad = 0.06 * (high - low)
    return AxisScale(low - pad, high + pad, frame.y_range)


def _training_line(x: AxisScale, y: AxisScale, curve: Curve, *, wide: bool) -> Markup:
    colour = f"k{curve.colour}"
    if len(curve.loss) < _SMOOTH_FROM:
        return draw_line(curve.loss, x, y, f"{'wide' if wide else 'curve'} {colour}")
    even = smooth_points(curve.loss, max(2, len(curve.loss) // 80))
    if wide:
        return draw_line(even, x, y, f"wide {colour}")
    return join_markup([draw_line(curve.loss, x, y, f"raw {colour}"), draw_line(even, x, y, f"curve {colour}")])


def _validation_line(x: AxisScale, y: AxisScale, curve: Curve) -> Markup:
    parts = []
    for colour, points in zip(_held_out_colours(curve), curve.held_out.values(), strict=True):
        parts.append(draw_line(points, x, y, f"held {colour}"))
        parts += [
            draw_mark("dot", x(position), y(value), f"{colour} f{colour[1:]}")
            for position, value in points
            if value is not None
        ]
    return join_markup(parts)


def _held_out_colours(curve: Curve) -> list[str]:
    """The colours of a curve's validation sets, which leave out that of the training."""
    return [f"k{_SET_COLOURS[number % len(_SET_COLOURS)]}" for number in range(len(curve.held_out))]


def _attack_marks(frame: PlotFrame, x: AxisScale, y: AxisScale, curve: Curve, row: int) -> Markup:
    floor, _ = frame.y_range
    losses = dict(curve.loss)
    parts = []
    for step, repaired in curve.attacked.items():
        x_step, bottom = x(step), floor - 2 - 8 * row
        ends = {"x1": x_step, "x2": x_step, "y1": bottom, "y2": bottom - 6}
        parts.append(make_element("line", {"class": f"rug {'kgood' if repaired else 'kbad'}", **ends}))
        if len(curve.attacked) > _MAX_MARKS:
            continue
        value = losses.get(step)
        height = frame.y_range[1] + 8 if value is None else y(value)
        parts.append(make_element("line", {"class": "drop", "x1": x_step, "x2": x_step, "y1": floor, "y2": height + 8}))
        shape, css = _attack_sign(repaired)
        parts.append(draw_mark(shape, x_step, height, css))
    return join_markup(parts)


def _level_line(frame: PlotFrame, y: AxisScale, name: str, value: float) -> Markup:
    x_left, right = frame.x_range
    y_level = y(value)
    return join_markup(
        [
            make_element("line", {"class": "level", "x1": x_left, "x2": right, "y1": y_level, "y2": y_level}),
            draw_text(right - 4, y_level - 5, f"{name}: {value:.2f}", "legend end halo"),
        ]
    )


def _legend_items(curves: Sequence[Curve]) -> list[tuple[Shape, str, str]]:
    items: list[tuple[Shape, str, str]] = [("line", f"k{curve.colour}", curve.label) for curve in curves]
    if len(curves) > 1:
        items[0] = ("line", f"wide k{curves[0].colour}", curves[0].label)
    else:
        sets = zip(_held_out_colours(curves[0]), curves[0].held_out, strict=True)
        items += [("dot", f"{colour} f{colour[1:]}", name) for colour, name in sets]
    signs = {repaired for curve in curves for repaired in curve.attacked.values()}
    for repaired in sorted(signs, reverse=True):
        shape, css = _attack_sign(repaired)
        items.append((shape, css, "attacked, repaired" if repaired else "attacked, not repaired"))
    return items


def _hover_bands(frame: PlotFrame, x: AxisScale, curves: Sequence[Curve]) -> Markup:
    steps = sorted({step for curve in curves for step, _ in curve.loss})
    stride = max(1, math.ceil(len(steps) / _MAX_BANDS))
    losses = [
        (curve, dict(curve.loss), {name: dict(points) for name, points in curve.held_out.items()}) for curve in curves
    ]
    parts = []
    for index in range(0, len(steps), stride):
        step = steps[index]
        lines = [f"step {step:g}"]
        for curve, loss, validation in losses:
            if step in loss:
                value = loss[step]
                lines.append(f"{curve.label}: {'no finite value' if value is None else format_amount(value)}")
            lines += [f"{name}: {format_amount(losses[step])}" for name, losses in validation.items() if step in losses]
            if step in curve.attacked:
                lines.append("attacked, repaired" if curve.attacked[step] else "attacked, not repaired")
        following = steps[min(index + stride, len(steps) - 1)]
        parts.append(hover_band(x(step), x(following), frame, "\n".join(lines)))
    return join_markup(parts)


def _attack_sign(repaired: bool) -> tuple[Shape, str]:
    return ("diamond", "kgood hollow") if repaired else ("cross", "kbad")


# the guarded run lies exactly on the clean one: a wide pale line below, a narrow dark one on top
_COLOURS = (2, 5, 0, 3, 1, 4, 6)


def write_curve_svg(run_dirs: Mapping[str, Path], out: Path) -> Path:
    """Draw the training losses of several runs, attacked steps marked, as one SVG file.

    Args:
        run_dirs: Run directories by the name that the legend shows; drawn in order, the last on top.

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
            raise InputError(f"{path / 'metrics.jsonl'}: has no finite loss; train first, or remove the run")
    frame = PlotFrame(height=360.0, right=24.0)
    drawn = loss_chart(frame, curves, hovers=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(standalone_svg(frame, drawn or Markup("")), encoding="utf-8")
    except OSError as exc:
        raise InputError(f"{out}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc
    return out
