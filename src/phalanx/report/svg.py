"""The parts that every picture is made of: scales, axes, lines, marks, legends."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from phalanx.config import is_plain

Attributes = Mapping[str, str | int | float]
_EMPTY_ELEMENTS = frozenset({"meta", "br", "circle", "line", "path", "rect"})


class Markup(str):
    """Text that is markup already, made by `make_element`; every other string is escaped."""

    __slots__ = ()


def make_element(tag: str, attributes: Attributes, *children: str) -> Markup:
    """Return one element.

    Args:
        attributes: Values are escaped; a float is written with two decimals at most.
        children: `Markup` as it is, any other text escaped.
    """
    shown = "".join(f' {name}="{_format_attribute(value)}"' for name, value in attributes.items())
    if tag in _EMPTY_ELEMENTS and not children:
        return Markup(f"<{tag}{shown}/>")
    return Markup(f"<{tag}{shown}>{join_markup(children)}</{tag}>")


def join_markup(parts: Iterable[str]) -> Markup:
    """Put parts one after the other; plain text among them is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape_text(part) for part in parts))


def escape_text(text: str) -> Markup:
    """Escape text for element content and for quoted attributes.

    Control, formatting and surrogate characters become U+FFFD: they could reverse or hide text.
    """
    visible = "".join(char if is_plain(char) or char in "\n\t" else "\ufffd" for char in text)
    return Markup(html.escape(visible, quote=True))


def _format_attribute(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape_text(str(value))


Shape = Literal["line", "dash", "square", "cross", "diamond", "triangle", "dot"]


@dataclass(frozen=True)
class PlotFrame:
    """The place of the axes in a picture, in its own units (pixels at full width)."""

    width: float = 860.0
    height: float = 280.0
    left: float = 64.0
    right: float = 16.0
    top: float = 34.0
    bottom: float = 46.0

    @property
    def x_range(self) -> tuple[float, float]:
        """Left and right end of the horizontal axis."""
        return self.left, self.width - self.right

    @property
    def y_range(self) -> tuple[float, float]:
        """Lower and upper end of the vertical axis; y grows downwards."""
        return self.height - self.bottom, self.top


_FINEST = 1e-300
"""Smallest distance of two ticks."""


class AxisScale:
    """A scale that maps values to positions, linearly or by logarithm.

    Args:
        low: Smallest value of the scale; finite.
        high: Largest value; finite. Equal ends are widened.
        ends: Positions of `low` and `high`.
        log: Logarithmic scale; needs a positive `low`.
    """

    def __init__(self, low: float, high: float, ends: tuple[float, float], *, log: bool = False) -> None:
        if not high > low:
            margin = max(0.5, 8 * math.ulp(low))
            low, high = (low / 1.1, low * 1.1) if log else (low - margin, low + margin)
        self.low, self.high, self.log = low, high, log
        self._start, self._end = ends

    def __call__(self, value: float) -> float:
        """Return the position of a value; one beyond the ends is put at the end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def tick_values(self, wanted: int = 6, *, whole: bool = False) -> list[float]:
        """Return round values on the scale; only whole ones when asked for."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            values = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
            return [value for value in values if self.low <= value <= self.high]
        # neighbouring floats have no round value between them
        finest = max(math.ulp(self.low), math.ulp(self.high), _FINEST)
        gap = _round_gap(max((self.high - self.low) / wanted, finest))
        if whole:
            gap = max(1.0, gap)
        first = math.ceil(self.low / gap - 1e-9)
        return [index * gap for index in range(first, math.floor(self.high / gap + 1e-9) + 1)]


def draw_picture(frame: PlotFrame, label: str, *parts: str) -> Markup:
    """Return a whole SVG element that scales with its place; `label` is for screen readers."""
    box = f"0 0 {frame.width:.0f} {frame.height:.0f}"
    attributes: Attributes = {"viewBox": box, "role": "img", "aria-label": label, "class": "chart"}
    return make_element("svg", {"xmlns": "http://www.w3.org/2000/svg", **attributes}, *parts)


def standalone_svg(frame: PlotFrame, *parts: str) -> str:
    """Return a picture that is a file of its own, with its colours."""
    # a card of its own, because the page around it may be light while the reader prefers dark
    outer: Attributes = {"viewBox": f"0 0 {frame.width:.0f} {frame.height:.0f}", "width": frame.width}
    card: Attributes = {"class": "paper", "width": frame.width, "height": frame.height, "rx": 10}
    ground = make_element("g", {"class": "chart"}, make_element("rect", card))
    root: Attributes = {"xmlns": "http://www.w3.org/2000/svg", **outer, "height": frame.height}
    return make_element("svg", root, style_sheet("chart.css"), ground, *parts)


def draw_axes(frame: PlotFrame, x: AxisScale, y: AxisScale, x_label: str, y_label: str) -> Markup:
    """Return grid lines, tick labels and the names of both axes with their units."""
    (x_left, right), (floor, ceiling) = frame.x_range, frame.y_range
    parts = []
    for value in y.tick_values(6):
        y_tick = y(value)
        parts.append(make_element("line", {"class": "grid", "x1": x_left, "x2": right, "y1": y_tick, "y2": y_tick}))
        parts.append(draw_text(x_left - 8, y_tick + 4, tick_label(value), "tick end"))
    for value in x.tick_values(8, whole=True):
        parts.append(draw_text(x(value), floor + 18, tick_label(value), "tick middle"))
    parts.append(make_element("line", {"class": "axis", "x1": x_left, "x2": right, "y1": floor, "y2": floor}))
    parts.append(draw_text((x_left + right) / 2, frame.height - 8, x_label, "label middle"))
    middle = (floor + ceiling) / 2
    turned = {"class": "label middle", "transform": f"translate(14 {middle:.1f}) rotate(-90)"}
    parts.append(make_element("text", turned, y_label))
    return join_markup(parts)


def draw_text(x: float, y: float, content: str, css: str) -> Markup:
    """Return one line of text at a position."""
    return make_element("text", {"x": x, "y": y, "class": css}, content)


def draw_line(points: Iterable[tuple[float, float | None]], x: AxisScale, y: AxisScale, css: str) -> Markup:
    """Return a line through the points; a point without a value leaves a gap."""
    steps: list[str] = []
    pen_is_down = False
    for position, value in points:
        if value is None:
            pen_is_down = False
            continue
        steps.append(f"{'L' if pen_is_down else 'M'}{x(position):.1f} {y(value):.1f}")
        pen_is_down = True
    return make_element("path", {"class": css, "d": " ".join(steps)}) if steps else Markup("")


def draw_mark(shape: Shape, x: float, y: float, css: str, title: str = "") -> Markup:
    """Return a small sign; signs differ in shape, so that colour is never the only difference."""
    path = {
        "cross": "M-5 -5L5 5M-5 5L5 -5",
        "diamond": "M0 -7L6 0L0 7L-6 0Z",
        "triangle": "M0 -6L6 5L-6 5Z",
        "square": "M-5 -5H5V5H-5Z",
        "line": "M-9 0H9",
        "dash": "M-9 0H-3M3 0H9",
        "dot": "M0 -4A4 4 0 1 1 0 4A4 4 0 1 1 0 -4Z",
    }[shape]
    attributes: Attributes = {"class": f"mark {css}", "d": path, "transform": f"translate({x:.1f} {y:.1f})"}
    return make_element("path", attributes, *([make_element("title", {}, title)] if title else []))


def hover_band(left: float, right: float, frame: PlotFrame, title: str) -> Markup:
    """Return an invisible band over the full height that shows `title` under the pointer."""
    floor, ceiling = frame.y_range
    box: Attributes = {"class": "hover", "x": left, "y": ceiling}
    size: Attributes = {"width": max(1.0, right - left), "height": floor - ceiling}
    return make_element("rect", {**box, **size}, make_element("title", {}, title))


def draw_legend(frame: PlotFrame, items: Sequence[tuple[Shape, str, str]]) -> Markup:
    """Return one row of signs with their names above the axes; items are (shape, css, name)."""
    parts, x_legend = [], frame.left + 10
    for shape, css, name in items:
        parts.append(draw_mark(shape, x_legend, 14, css))
        parts.append(draw_text(x_legend + 14, 18, name, "legend"))
        x_legend += 14 + 6.6 * len(name) + 26
    return join_markup(parts)


def tick_label(value: float) -> str:
    """Return a short number: 1500 as 1.5k, 0.05 as it is."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    return f"{value:.6g}"


def style_sheet(name: str) -> Markup:
    """Return one of the style sheets that are packaged beside this file."""
    sheet = resources.files("phalanx.report").joinpath(name).read_text(encoding="utf-8")
    return Markup(f"<style>{sheet}</style>")


def _round_gap(gap: float) -> float:
    power = 10.0 ** math.floor(math.log10(gap))
    return next(step for step in (1 * power, 2 * power, 5 * power, 10 * power) if step >= gap * 0.999)
