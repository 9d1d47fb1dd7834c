"""Histograms of weights and gradients, a small picture for each parameter."""

from collections.abc import Sequence
from typing import Any

from phalanx.report.figures import amount, count, number, words
from phalanx.report.read import Row, RunRecord
from phalanx.report.shell import section
from phalanx.report.svg import Markup, element, join
from phalanx.report.tables import table

_MOST, _MOST_BINS = 200, 512
_WIDTH, _HEIGHT = 160.0, 36.0


def histograms_section(record: RunRecord) -> Markup | None:
    """Return the latest histograms of the run; None where it drew none."""
    found = [row for row in record.metrics if isinstance(row.get("histograms"), list)]
    if not found:
        return None
    latest = [one for one in found[-1]["histograms"] if isinstance(one, dict)]
    drawn = {(words(one.get("of")), words(one.get("name"))): _small_picture(one) for one in latest}
    names = list(dict.fromkeys(name for _, name in drawn))
    rows = [[_breakable(name), drawn.get(("weights", name), ""), drawn.get(("gradients", name), "")] for name in names]
    more = f" The first {_MOST} of {count(len(rows))} parameters." if len(rows) > _MOST else ""
    remark = (
        f"After step {count(found[-1]['step'] + 1)}, from the least value to the greatest. Gradients are the "
        f"optimizer's running mean. metrics.jsonl has those of every validation.{more}"
    )
    shown = table(["Parameter", "Weights", "Gradients"], rows[:_MOST])
    return section("Weights and gradients", remark, shown)


def _small_picture(one: Row) -> Markup:
    low, high, counts = number(one.get("low")), number(one.get("high")), _counts(one.get("counts"))
    if low is None or high is None or not counts or not max(counts):
        return element("span", {}, "no finite value")
    odd = number(one.get("not_finite")) or 0.0
    width, most = _WIDTH / len(counts), max(counts)
    bars = [
        element("rect", {"x": place * width, "y": _HEIGHT * (1 - share / most), "width": width, **_tall(share / most)})
        for place, share in enumerate(counts)
        if share
    ]
    ends = f"{amount(low)} to {amount(high)}"
    said = f"{ends}, {count(odd)} not finite" if odd else ends
    box: dict[str, Any] = {"viewBox": f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", "preserveAspectRatio": "none"}
    drawn = element("svg", {**box, "role": "img", "aria-label": said, "class": "spark f0"}, *bars)
    return join([drawn, element("div", {"class": "name"}, said)])


def _breakable(name: str) -> Markup:
    """Let a name break behind its dots, where a screen is narrow."""
    first, *others = name.split(".")
    rest = [part for one in others for part in (".", element("wbr", {}), one)]
    return element("span", {}, first, *rest)


def _tall(share: float) -> dict[str, float]:
    return {"height": _HEIGHT * share}


def _counts(found: Any) -> Sequence[float]:
    values = [number(one) for one in found[:_MOST_BINS]] if isinstance(found, list) else []
    return [max(0.0, one) for one in values if one is not None]
