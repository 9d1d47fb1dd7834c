"""Bars over the steps of a run, and bars beside names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.report.markup import Attributes, Markup, element
from phalanx.report.svg import AxisScale, PlotFrame, Shape, axes, legend, mark, picture, text

MAX_BARS = 96
Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """One bar over one or more steps.

    Attributes:
        first: First step it stands for.
        last: Last step it stands for.
        parts: Colour class and value of each part, from the bottom.
        title: What the pointer shows.
        sign: A mark on top of the bar, as shape and colour class.
    """

    first: float
    last: float
    parts: list[tuple[str, float]]
    title: str
    sign: tuple[Shape, str] | None = None


def bins(rows: Sequence[Row], limit: int = MAX_BARS) -> list[list[Row]]:
    """Put consecutive rows together so that at most `limit` groups are left."""
    stride = max(1, math.ceil(len(rows) / limit))
    return [list(rows[start : start + stride]) for start in range(0, len(rows), stride)]


def step_bars(
    frame: PlotFrame, bars: Sequence[Bar], y_label: str, items: Sequence[tuple[Shape, str, str]], label: str
) -> Markup:
    """Draw stacked bars over the steps.

    Args:
        frame: Size of the picture.
        bars: At least one, in order of their steps.
        y_label: Name of the vertical axis, with its unit.
        items: Legend, as (shape, colour class, name).
        label: What a screen reader says.
    """
    first, last = min(bar.first for bar in bars), max(bar.last for bar in bars)
    highest = max(sum(value for _, value in bar.parts) for bar in bars)
    x = AxisScale(first - 0.5, max(last, first) + 0.5, frame.x_range)
    y = AxisScale(0.0, (highest or 1.0) * 1.12, frame.y_range)
    parts: list[str] = [axes(frame, x, y, "step", y_label), legend(frame, items)]
    for bar in bars:
        parts.extend(_bar(bar, x, y))
    return picture(frame, label, *parts)


def name_bars(rows: Sequence[tuple[str, float]], show: Callable[[float], str], label: str, css: str = "f0") -> Markup:
    """Draw one horizontal bar beside each name, longest first as given.

    Args:
        rows: Names and values, not negative.
        show: Turns a value into text with its unit.
        label: What a screen reader says.
        css: Colour class.
    """
    frame = PlotFrame(height=16.0 + 28.0 * len(rows), left=230.0, right=210.0, top=8.0, bottom=8.0)
    x = AxisScale(0.0, max(value for _, value in rows) or 1.0, frame.x_range)
    parts = []
    for index, (name, value) in enumerate(rows):
        at = frame.top + 28.0 * index
        shown = name if len(name) <= 32 else name[:31] + "…"
        parts.append(text(frame.left - 10, at + 18, shown, "name end"))
        box: Attributes = {"class": f"bar {css}", "x": frame.left, "y": at + 4, "height": 19.0, "rx": 2}
        width = max(1.0, x(value) - frame.left)
        parts.append(element("rect", {**box, "width": width}, element("title", {}, f"{name}: {show(value)}")))
        parts.append(text(frame.left + width + 8, at + 18, show(value), "name"))
    return picture(frame, label, *parts)


def _bar(bar: Bar, x: AxisScale, y: AxisScale) -> list[Markup]:
    left, right = x(bar.first - 0.5), x(bar.last + 0.5)
    gap = min(2.0, 0.15 * (right - left))
    title = element("title", {}, bar.title)
    parts, total = [], 0.0
    for css, value in bar.parts:
        if value <= 0:
            continue
        bottom, top = y(total), y(total + value)
        place: Attributes = {"x": left + gap / 2, "y": top, "width": right - left - gap}
        box: Attributes = {"class": f"bar {css}", **place, "height": max(0.0, bottom - top)}
        parts.append(element("rect", box, title))
        total += value
    if bar.sign is not None:
        shape, css = bar.sign
        parts.append(mark(shape, (left + right) / 2, y(total) - 9, css, bar.title))
    return parts
