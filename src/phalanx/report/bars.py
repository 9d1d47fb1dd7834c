"""Bars over the steps of a run, bars beside names, and the stages of the pipeline in a row."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.planner.cost.schedule import Slot, Timeline
from phalanx.report.figures import format_duration
from phalanx.report.shell import write_page
from phalanx.report.svg import (
    Attributes,
    AxisScale,
    Markup,
    PlotFrame,
    Shape,
    draw_axes,
    draw_legend,
    draw_mark,
    draw_picture,
    draw_text,
    make_element,
    standalone_svg,
    tick_label,
)

MAX_BARS = 96
Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """One bar over one or more steps.

    Attributes:
        parts: Colour class and value of each part, from the bottom.
        title: Text that a tooltip shows.
        sign: A mark on top of the bar, as shape and colour class.
    """

    first: float
    last: float
    parts: list[tuple[str, float]]
    title: str
    sign: tuple[Shape, str] | None = None


def bin_rows(rows: Sequence[Row], limit: int = MAX_BARS) -> list[list[Row]]:
    """Put consecutive rows together so that at most `limit` groups are left."""
    stride = max(1, math.ceil(len(rows) / limit))
    return [list(rows[start : start + stride]) for start in range(0, len(rows), stride)]


def step_bars(
    frame: PlotFrame, bars: Sequence[Bar], y_label: str, items: Sequence[tuple[Shape, str, str]], label: str
) -> Markup:
    """Draw stacked bars over the steps.

    Args:
        bars: At least one, in order of their steps.
        items: Legend, as (shape, colour class, name).
    """
    first, last = min(bar.first for bar in bars), max(bar.last for bar in bars)
    highest = max(sum(value for _, value in bar.parts) for bar in bars)
    x = AxisScale(first - 0.5, max(last, first) + 0.5, frame.x_range)
    y = AxisScale(0.0, (highest or 1.0) * 1.12, frame.y_range)
    parts: list[str] = [draw_axes(frame, x, y, "step", y_label), draw_legend(frame, items)]
    for bar in bars:
        parts.extend(_draw_bar(bar, x, y))
    return draw_picture(frame, label, *parts)


def name_bars(rows: Sequence[tuple[str, float]], show: Callable[[float], str], label: str, css: str = "f0") -> Markup:
    """Draw one horizontal bar beside each name, longest first as given.

    Args:
        show: Turns a value into text with its unit.
    """
    margin = _room_for([name for name, _ in rows], 262.0)
    frame = PlotFrame(height=16.0 + 28.0 * len(rows), left=margin, right=210.0, top=8.0, bottom=8.0)
    x = AxisScale(0.0, max(value for _, value in rows) or 1.0, frame.x_range)
    parts = []
    for index, (name, value) in enumerate(rows):
        top = frame.top + 28.0 * index
        shown = name if len(name) <= 32 else name[:31] + "…"
        parts.append(draw_text(frame.left - 10, top + 18, shown, "name end"))
        box: Attributes = {"class": f"bar {css}", "x": frame.left, "y": top + 4, "height": 19.0, "rx": 2}
        width = max(1.0, x(value) - frame.left)
        parts.append(make_element("rect", {**box, "width": width}, make_element("title", {}, f"{name}: {show(value)}")))
        parts.append(draw_text(frame.left + width + 8, top + 18, show(value), "name"))
    return draw_picture(frame, label, *parts)


def _room_for(names: Sequence[str], most: float) -> float:
    """Return the width that names beside bars need, so that a small screen begins with the bars and not with a gap."""
    return min(most, 18.0 + 7.6 * max(len(name) for name in names))


def _draw_bar(bar: Bar, x: AxisScale, y: AxisScale) -> list[Markup]:
    x_left, right = x(bar.first - 0.5), x(bar.last + 0.5)
    gap = min(2.0, 0.15 * (right - x_left))
    title = make_element("title", {}, bar.title)
    parts, total = [], 0.0
    for css, value in bar.parts:
        if value <= 0:
            continue
        bottom, top = y(total), y(total + value)
        place: Attributes = {"x": x_left + gap / 2, "y": top, "width": right - x_left - gap}
        box: Attributes = {"class": f"bar {css}", **place, "height": max(0.0, bottom - top)}
        parts.append(make_element("rect", box, title))
        total += value
    if bar.sign is not None:
        shape, css = bar.sign
        parts.append(draw_mark(shape, (x_left + right) / 2, y(total) - 9, css, bar.title))
    return parts


_ROW = 26.0
_FAR = 4.0
"""A limit so many times longer than every bar is told and not drawn: bars could not be told apart."""
_COLOURS = tuple(f"f{n}" for n in range(7))


def part_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    show: Callable[[float], str],
    label: str,
    limit: float | None = None,
    colours: Sequence[str] = _COLOURS,
) -> Markup:
    """Draw one bar of parts beside each name.

    Args:
        rows: At least one; names with their parts, the same parts in every row, none negative.
        show: Turns a value into text with its unit.
        limit: Position of a line that bars should not cross; a limit far beyond the bars is described in words.
        colours: CSS class of each part.
    """
    margin = _room_for([name for name, _ in rows], 300.0)
    frame = PlotFrame(height=54.0 + _ROW * len(rows), left=margin, right=90.0, top=34.0, bottom=8.0)
    longest = max(sum(parts.values()) for _, parts in rows)
    is_far = limit is not None and limit > _FAR * longest > 0
    x = AxisScale(0.0, max(longest, 0.0 if is_far else limit or 0.0) or 1.0, frame.x_range)
    names = list(rows[0][1])
    css = [colours[n % len(colours)] for n in range(len(names))]
    items: list[tuple[Shape, str, str]] = [
        ("square", f"k{fill[1:]} {fill}", name) for fill, name in zip(css, names, strict=True)
    ]
    drawn = [draw_legend(PlotFrame(left=8.0), items)]
    for index, (name, parts) in enumerate(rows):
        shown = [(fill, part, value) for fill, (part, value) in zip(css, parts.items(), strict=True)]
        drawn += _draw_row(frame, x, frame.top + _ROW * index, name, shown, show)
    if limit is not None:
        x_limit, floor = x(limit), frame.top + _ROW * len(rows) + 4
        if not is_far:
            drawn.append(
                make_element("line", {"class": "level", "x1": x_limit, "x2": x_limit, "y1": frame.top, "y2": floor})
            )
        remark = ", far to the right" if is_far else ""
        drawn.append(draw_text(x_limit, floor + 12, f"limit {show(limit)}{remark}", "tick end"))
    return draw_picture(frame, label, *drawn)


def _draw_row(
    frame: PlotFrame,
    x: AxisScale,
    top: float,
    name: str,
    parts: Sequence[tuple[str, str, float]],
    show: Callable[[float], str],
) -> list[Markup]:
    shown = name if len(name) <= 37 else name[:36] + "…"
    drawn = [draw_text(frame.left - 10, top + 15, shown, "name end")]
    start = 0.0
    for fill, part, value in parts:
        x_left, right = x(start), x(start + value)
        box: Attributes = {"class": f"bar {fill}", "x": x_left, "y": top + 2, "height": 18.0}
        title = make_element("title", {}, f"{name}\n{part}: {show(value)}")
        if right - x_left >= 0.05:
            drawn.append(make_element("rect", {**box, "width": right - x_left}, title))
        start += value
    return [*drawn, draw_text(x(start) + 6, top + 15, show(start), "tick")]


_STAGE_COLOURS = {"forward": "f0", "backward": "f1", "inputs": "f1", "weights": "f2"}
_NAMES = {"forward": "forward", "backward": "backward", "inputs": "backward to the inputs", "weights": "weights"}
_STAGE_ROW = 24.0


def pipeline_chart(timeline: Timeline) -> Markup:
    """Draw one row per rank; gaps are the bubble."""
    frame = PlotFrame(height=84.0 + _STAGE_ROW * timeline.num_ranks, left=64.0, top=34.0, bottom=46.0)
    x = AxisScale(0.0, timeline.length_s, frame.x_range)
    kinds = list(dict.fromkeys(slot.work.kind for slot in timeline.slots))
    items: list[tuple[Shape, str, str]] = [
        ("square", f"{_STAGE_COLOURS[kind].replace('f', 'k')} {_STAGE_COLOURS[kind]}", _NAMES[kind]) for kind in kinds
    ]
    drawn = [draw_legend(frame, items)]
    drawn += [
        draw_text(frame.left - 8, frame.top + _STAGE_ROW * rank + 15, f"rank {rank}", "tick end")
        for rank in range(timeline.num_ranks)
    ]
    drawn += [_draw_slot(slot, x, frame.top + _STAGE_ROW * slot.rank) for slot in timeline.slots]
    floor = frame.top + _STAGE_ROW * timeline.num_ranks + 8
    drawn += [draw_text(x(value), floor + 14, tick_label(value), "tick middle") for value in x.tick_values(8)]
    drawn.append(draw_text(sum(frame.x_range) / 2, floor + 32, "seconds", "label middle"))
    return draw_picture(frame, f"Timeline of a pipeline, {100 * timeline.bubble_share:.1f} % of it idle", *drawn)


def _draw_slot(slot: Slot, x: AxisScale, top: float) -> Markup:
    x_left, right = x(slot.start), x(slot.end)
    work = slot.work
    length = format_duration(slot.end - slot.start)
    title = f"{_NAMES[work.kind]}, stage {work.stage}, microbatch {work.microbatch}: {length}"
    box: Attributes = {"class": f"bar {_STAGE_COLOURS[work.kind]}", "x": x_left, "y": top + 2, "height": _STAGE_ROW - 5}
    # a thin gap keeps neighbours apart; with very many there is no room for one
    gap = min(1.0, 0.15 * (right - x_left))
    drawn = make_element("rect", {**box, "width": max(0.05, right - x_left - gap)}, make_element("title", {}, title))
    if right - x_left < 24:
        return drawn
    number: Attributes = {"x": (x_left + right) / 2, "y": top + 15, "class": "tick middle halo"}
    return Markup(drawn + make_element("text", number, str(work.microbatch)))


def write_fertility_svg(rows: Sequence[tuple[str, float]], out: Path) -> Path:
    """Draw one bar for each vocabulary and group of texts."""
    bars = name_bars(rows, "{:.2f} tokens in 100 bytes".format, "Tokens in 100 bytes of text, by vocabulary")
    return write_page(out, standalone_svg(PlotFrame(height=16.0 + 28.0 * len(rows)), bars))
