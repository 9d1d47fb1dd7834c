"""Horizontal bars beside names, each made of parts."""

from collections.abc import Callable, Mapping, Sequence

from phalanx.report.markup import Attributes, Markup, element
from phalanx.report.svg import AxisScale, PlotFrame, Shape, legend, picture, text

_ROW = 26.0
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
        label: What a screen reader says.
        limit: Where a line is drawn that bars should not cross.
        colours: Class of each part.
    """
    frame = PlotFrame(height=54.0 + _ROW * len(rows), left=300.0, right=90.0, top=34.0, bottom=8.0)
    longest = max(sum(parts.values()) for _, parts in rows)
    x = AxisScale(0.0, max(longest, limit or 0.0) or 1.0, frame.x_range)
    names = list(rows[0][1])
    css = [colours[n % len(colours)] for n in range(len(names))]
    items: list[tuple[Shape, str, str]] = [
        ("square", f"k{fill[1:]} {fill}", name) for fill, name in zip(css, names, strict=True)
    ]
    drawn = [legend(PlotFrame(left=8.0), items)]
    for index, (name, parts) in enumerate(rows):
        shown = [(fill, part, value) for fill, (part, value) in zip(css, parts.items(), strict=True)]
        drawn += _row(frame, x, frame.top + _ROW * index, name, shown, show)
    if limit is not None:
        at, floor = x(limit), frame.top + _ROW * len(rows) + 4
        drawn.append(element("line", {"class": "level", "x1": at, "x2": at, "y1": frame.top, "y2": floor}))
        drawn.append(text(at, floor + 12, f"limit {show(limit)}", "tick end"))
    return picture(frame, label, *drawn)


def _row(
    frame: PlotFrame,
    x: AxisScale,
    top: float,
    name: str,
    parts: Sequence[tuple[str, str, float]],
    show: Callable[[float], str],
) -> list[Markup]:
    shown = name if len(name) <= 40 else name[:39] + "…"
    drawn = [text(frame.left - 10, top + 15, shown, "name end")]
    start = 0.0
    for fill, part, value in parts:
        left, right = x(start), x(start + value)
        box: Attributes = {"class": f"bar {fill}", "x": left, "y": top + 2, "height": 18.0}
        title = element("title", {}, f"{name}\n{part}: {show(value)}")
        if right - left >= 0.05:
            drawn.append(element("rect", {**box, "width": right - left}, title))
        start += value
    return [*drawn, text(x(start) + 6, top + 15, show(start), "tick")]
