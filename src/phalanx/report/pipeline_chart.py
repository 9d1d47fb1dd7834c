"""Draw a pipeline's step: what each stage works on at each moment, and when it waits."""

from phalanx.planner.cost.schedule import Slot, Timeline
from phalanx.report.figures import duration
from phalanx.report.markup import Attributes, Markup, element
from phalanx.report.svg import AxisScale, PlotFrame, Shape, legend, picture, text, tick_label

_COLOURS = {"forward": "f0", "backward": "f1", "inputs": "f1", "weights": "f2"}
_NAMES = {"forward": "forward", "backward": "backward", "inputs": "backward to the inputs", "weights": "weights"}
_ROW = 24.0


def pipeline_chart(timeline: Timeline) -> Markup:
    """Draw one row per rank; what is empty is the bubble."""
    frame = PlotFrame(height=84.0 + _ROW * timeline.num_ranks, left=64.0, top=34.0, bottom=46.0)
    x = AxisScale(0.0, timeline.length_s, frame.x_range)
    kinds = list(dict.fromkeys(slot.work.kind for slot in timeline.slots))
    items: list[tuple[Shape, str, str]] = [
        ("square", f"{_COLOURS[kind].replace('f', 'k')} {_COLOURS[kind]}", _NAMES[kind]) for kind in kinds
    ]
    drawn = [legend(frame, items)]
    drawn += [
        text(frame.left - 8, frame.top + _ROW * rank + 15, f"rank {rank}", "tick end")
        for rank in range(timeline.num_ranks)
    ]
    drawn += [_box(slot, x, frame.top + _ROW * slot.rank) for slot in timeline.slots]
    floor = frame.top + _ROW * timeline.num_ranks + 8
    drawn += [text(x(value), floor + 14, tick_label(value), "tick middle") for value in x.ticks(8)]
    drawn.append(text(sum(frame.x_range) / 2, floor + 32, "seconds", "label middle"))
    return picture(frame, f"Timeline of a pipeline, {100 * timeline.bubble:.1f} % of it idle", *drawn)


def _box(slot: Slot, x: AxisScale, top: float) -> Markup:
    left, right = x(slot.start), x(slot.end)
    work = slot.work
    title = f"{_NAMES[work.kind]}, stage {work.stage}, microbatch {work.microbatch}: {duration(slot.end - slot.start)}"
    box: Attributes = {"class": f"bar {_COLOURS[work.kind]}", "x": left, "y": top + 2, "height": _ROW - 5}
    # a thin gap keeps neighbours apart; with very many there is no room for one
    gap = min(1.0, 0.15 * (right - left))
    drawn = element("rect", {**box, "width": max(0.05, right - left - gap)}, element("title", {}, title))
    if right - left < 24:
        return drawn
    number: Attributes = {"x": (left + right) / 2, "y": top + 15, "class": "tick middle halo"}
    return Markup(drawn + element("text", number, str(work.microbatch)))
