"""A page about exchanges between ranks: an all-reduce against gathering at one rank, over ranks and sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.report.figures import format_amount, format_size, parse_number, short_text
from phalanx.report.shell import make_section, page_shell, write_page
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
    make_element,
)
from phalanx.report.tables import make_table

_SUMS: Mapping[str, tuple[str, int, Shape]] = {
    "all_reduce": ("all-reduce on a ring", 0, "dot"),
    "all_reduce_halving_doubling": ("by halving and doubling", 2, "square"),
    "all_reduce_ring": ("on a ring of sends", 3, "diamond"),
    "gather_to_one": ("gather to one rank", 5, "triangle"),
}
_PICTURES = 2
_HEADS = ("Exchange", "Ranks", "Bytes", "Milliseconds", "CPU, milliseconds", "Over the bound")

Row = Mapping[str, Any]


def write_exchanges(path: Path, result: Mapping[str, Any]) -> Path:
    """Write what ``phalanx bench collectives`` has measured as one self-contained page."""
    return write_page(path, render_exchanges(result))


def render_exchanges(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    rows = [row for row in result["rows"] if parse_number(row["seconds"]) is not None]
    sizes = sorted({row["bytes"] for row in rows}, reverse=True)[:_PICTURES]
    machine = result["machine"]
    head = make_element(
        "header",
        {},
        make_element(
            "p", {"class": "run"}, f"Measured on {short_text(machine.get('cpu'), 80)}, {machine.get('cores')} cores"
        ),
        make_element("h1", {}, "Exchanges between ranks"),
    )
    remark = (
        "Time until every rank has the sum. The dashed line is what bandwidth alone allows: every rank must send "
        "2 (n - 1) / n of the bytes. Ranks that outnumber the cores also wait for a core."
    )
    drawn = [make_section(f"The sum of {format_size(of)} of each", remark, exchange_chart(rows, of)) for of in sizes]
    cells = [
        (
            short_text(row["op"], 40),
            format_amount(row["ranks"]),
            format_size(row["bytes"]),
            format_amount(1e3 * row["seconds"]),
            format_amount(1e3 * row["cpu_s"]),
            format_amount(row["over_bound"], 3),
        )
        for row in rows
    ]
    return page_shell(
        "Exchanges between ranks", [head, *drawn, make_section("All of them", "", make_table(_HEADS, cells))]
    )


def exchange_chart(rows: Sequence[Row], of: int) -> Markup:
    """Draw milliseconds of the sums of one size over ranks, beside the bound.

    Args:
        of: Size of the sums in bytes.
    """
    shown = [row for row in rows if row["bytes"] == of and row["op"] in _SUMS]
    bound = sorted({(row["ranks"], 1e3 * row["bound_s"]) for row in shown if row["bound_s"] is not None})
    frame = PlotFrame(height=260.0)
    highest = max((1e3 * row["seconds"] for row in shown), default=1.0)
    ranks = [row["ranks"] for row in shown] or [1]
    x, y = AxisScale(min(ranks), max(ranks), frame.x_range), AxisScale(0.0, 1.1 * highest, frame.y_range)
    parts = [draw_axes(frame, x, y, "ranks", "milliseconds"), draw_line(bound, x, y, "held ksoft")]
    items: list[tuple[Shape, str, str]] = []
    for op, (name, colour, shape) in _SUMS.items():
        points = sorted((row["ranks"], 1e3 * row["seconds"]) for row in shown if row["op"] == op)
        css = f"k{colour} f{colour}"
        parts.append(draw_line(points, x, y, f"curve k{colour}"))
        parts += [
            draw_mark(shape, x(x_value), y(value), css, f"{name}, {x_value} ranks: {value:.3g} ms")
            for x_value, value in points
        ]
        items += [(shape, css, name)] if points else []
    items.append(("dash", "ksoft", "bound by bandwidth"))
    return draw_picture(frame, f"Milliseconds to sum {format_size(of)} over ranks", *parts, draw_legend(frame, items))
