"""The picture of a learning-rate finder: losses over the rates that they were had at."""

from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import InputError
from phalanx.report.figures import format_amount
from phalanx.report.shell import write_page
from phalanx.report.svg import (
    AxisScale,
    Markup,
    PlotFrame,
    draw_axes,
    draw_legend,
    draw_line,
    draw_picture,
    draw_text,
    join_markup,
    make_element,
    standalone_svg,
)

Rate = tuple[float, float | None, float | None]
"""Learning rate, loss and smoothed loss of one step."""


def write_rate_svg(rates: Sequence[Rate], suggested: float | None, out: Path) -> Path:
    """Draw losses over learning rates as one SVG file.

    Args:
        rates: Learning rate of every step, rising.
        suggested: A rate that is marked; None for none.
    """
    losses = [loss for _, loss, _ in rates if loss is not None]
    if not losses:
        raise InputError(f"{out}: there is no finite loss to draw; begin lower with --to")
    frame = PlotFrame(height=360.0, right=24.0)
    x = AxisScale(rates[0][0], rates[-1][0], frame.x_range)
    pad = 0.06 * (max(losses) - min(losses))
    y = AxisScale(min(losses) - pad, max(losses) + pad, frame.y_range)
    parts: list[Markup] = [_rates_axis(frame, x, y)]
    parts.append(draw_line([(rate, loss) for rate, loss, _ in rates], x, y, "raw k0"))
    parts.append(draw_line([(rate, smoothed) for rate, _, smoothed in rates], x, y, "curve k0"))
    if suggested is not None:
        (floor, top), x_rate = frame.y_range, x(suggested)
        parts.append(make_element("line", {"class": "level", "x1": x_rate, "x2": x_rate, "y1": floor, "y2": top}))
        parts.append(draw_text(x_rate + 4, top + 12, f"suggested {format_amount(suggested, 2)}", "legend halo"))
    parts.append(draw_legend(frame, [("line", "k0", "smoothed training loss")]))
    write_page(out, standalone_svg(frame, draw_picture(frame, "Loss by learning rate", *parts)))
    return out


def _rates_axis(frame: PlotFrame, x: AxisScale, y: AxisScale) -> Markup:
    """The axes, with rates at the ends and in the middle: round ticks of small numbers would be none."""
    floor, _ = frame.y_range
    ends = [x.low, (x.low + x.high) / 2, x.high]
    labels = [draw_text(x(rate), floor + 18, format_amount(rate, 2), "tick middle") for rate in ends]
    empty = AxisScale(0.25, 0.75, frame.x_range)
    return join_markup([draw_axes(frame, empty, y, "learning rate", "loss (nats)"), *labels])
