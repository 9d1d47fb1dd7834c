"""Histograms of weights and gradients, a small picture for each parameter."""

from collections.abc import Sequence
from typing import Any

from phalanx.report.figures import format_amount, format_count, parse_number, short_text
from phalanx.report.read import Row, RunRecord
from phalanx.report.shell import make_section
from phalanx.report.svg import Markup, join_markup, make_element
from phalanx.report.tables import make_table

_MOST, _MAX_BINS = 200, 512
_WIDTH, _HEIGHT = 160.0, 36.0


def histograms_section(record: RunRecord) -> Markup | None:
    """Return the latest histograms of the run; None where it drew none."""
    recorded = [row for row in record.metrics if isinstance(row.get("histograms"), list)]
    if not recorded:
        return None
    latest = [histogram for histogram in recorded[-1]["histograms"] if isinstance(histogram, dict)]
    drawn = {
        (short_text(histogram.get("of")), short_text(histogram.get("name"))): _small_picture(histogram)
        for histogram in latest
    }
    names = list(dict.fromkeys(name for _, name in drawn))
    rows = [
        [_breakable_name(name), drawn.get(("weights", name), ""), drawn.get(("gradients", name), "")] for name in names
    ]
    more = f" The first {_MOST} of {format_count(len(rows))} parameters." if len(rows) > _MOST else ""
    remark = (
        f"After step {format_count(recorded[-1]['step'] + 1)}, from the least value to the greatest. Gradients are the "
        f"optimizer's running mean. metrics.jsonl has those of every validation.{more}"
    )
    shown = make_table(["Parameter", "Weights", "Gradients"], rows[:_MOST])
    return make_section("Weights and gradients", remark, shown)


def _small_picture(one: Row) -> Markup:
    low, high, counts = parse_number(one.get("low")), parse_number(one.get("high")), _read_counts(one.get("counts"))
    if low is None or high is None or not counts or not max(counts):
        return make_element("span", {}, "no finite value")
    odd = parse_number(one.get("not_finite")) or 0.0
    width, largest = _WIDTH / len(counts), max(counts)
    bars = [
        make_element(
            "rect",
            {"x": place * width, "y": _HEIGHT * (1 - share / largest), "width": width, **_bar_height(share / largest)},
        )
        for place, share in enumerate(counts)
        if share
    ]
    ends = f"{format_amount(low)} to {format_amount(high)}"
    label = f"{ends}, {format_count(odd)} not finite" if odd else ends
    box: dict[str, Any] = {"viewBox": f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", "preserveAspectRatio": "none"}
    drawn = make_element("svg", {**box, "role": "img", "aria-label": label, "class": "spark f0"}, *bars)
    return join_markup([drawn, make_element("div", {"class": "name"}, label)])


def _breakable_name(name: str) -> Markup:
    """Let a name break behind its dots, where a screen is narrow."""
    first, *others = name.split(".")
    rest = [part for part_name in others for part in (".", make_element("wbr", {}), part_name)]
    return make_element("span", {}, first, *rest)


def _bar_height(share: float) -> dict[str, float]:
    return {"height": _HEIGHT * share}


def _read_counts(counts: Any) -> Sequence[float]:
    values = [parse_number(value) for value in counts[:_MAX_BINS]] if isinstance(counts, list) else []
    return [max(0.0, value) for value in values if value is not None]
