"""Drawings of the concept pages: ``python scripts/drawings.py`` writes them into ``docs/images``.

Figures are read from a raw result; a test draws all of them again and compares them with what is committed.
"""

import json
from pathlib import Path
from typing import Any

from phalanx.report.bars import part_bars
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
    standalone_svg,
)

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
PRESETS = ROOT / "benchmarks" / "results" / "overhead-presets-cpu-2cores.json"
STAGES = ROOT / "benchmarks" / "results" / "stage-leaks-cpu-2cores-busy.json"
_STYLE = """.chart .box { fill: var(--paper); stroke-width: 1.6; } .chart .zone { fill: none; stroke-width: 1.4; }
.chart .apart { stroke-dasharray: 6 5; } .chart .arrow { fill: none; stroke-width: 1.5; }
.chart .strong { fill: var(--ink); font-size: 13px; font-weight: 600; }
.chart .plain { fill: var(--ink); font-size: 12.5px; }"""


def main() -> None:
    """Write every drawing."""
    for name, drawing in drawings().items():
        (IMAGES / name).write_text(drawing + "\n", encoding="utf-8")


def drawings() -> dict[str, str]:
    """Return each drawing by its file name."""
    return {
        "verified_step.svg": verified_step(),
        "trust.svg": trust(),
        "guard_costs.svg": guard_costs(),
        "leak_and_loss.svg": leak_and_loss(),
        "leak_and_work.svg": leak_and_work(),
    }


def verified_step() -> str:
    """Return one step of four stages: each party's part from left to right, and what a difference leads to."""
    frame = PlotFrame(width=860.0, height=452.0)
    tops = {"owner": 62.0, "worker-1": 176.0, "worker-2": 290.0}
    serves = {"owner": "stages 0 and 3", "worker-1": "stage 1", "worker-2": "stage 2"}
    parts = [words(14, top + 20, name, "strong") for name, top in tops.items()]
    parts += [words(14, top + 38, serves[name], "plain") for name, top in tops.items()]
    heads = {118: "2, 3  compute", 268: "4, 5  commit", 408: "6  draw", 520: "7  audit", 652: "8  verdict"}
    parts += [words(at, 36, head, "plain") for at, head in ({**heads, 770: "9, 10  apply"}).items()]
    for name, top in tops.items():
        css = "k0" if name == "owner" else "k2"
        parts.append(box(118, top, 118, 54, ["forward and", "backward"], css))
        told = ["compares", "digests"] if name == "owner" else ["signs digests", "of all it sent"]
        parts.append(box(268, top, 110, 54, told, css))
        parts.append(box(770, top, 78, 54, ["optimizer,", "digest"], css))
    parts.append(box(408, 62, 84, 54, ["draws q M", "of M"], "k0"))
    parts.append(box(520, 62, 104, 54, ["now and then", "a whole step"], "k0"))
    parts += [box(520, tops[f"worker-{n}"], 104, 54, ["recomputes", f"stage {3 - n}"], "k1") for n in (1, 2)]
    parts.append(box(652, 62, 92, 54, ["equal bits?", "else referee"], "kbad"))
    # activations go down and gradients come back; then digests, requests and results go to and from the owner
    for upper, lower in ((116, 176), (230, 290)):
        parts += [arrow(162, upper, 162, lower, "k2"), arrow(192, lower, 192, upper, "k3")]
    parts += [words(104, 150, "activations", "plain end"), words(202, 150, "gradients", "plain")]
    parts.append(arrow(323, 176, 323, 118, "k0"))
    parts.append(words(332, 150, "32 bytes a tensor", "plain"))
    parts.append(path("M450 116V317H518", "k0 apart"))
    parts += [path("M450 203H518", "k0 apart"), head(520, 203, 0, "k0"), head(520, 317, 0, "k0")]
    parts += [path("M624 203H676V118", "k1"), path("M624 317H700V118", "k1")]
    parts += [head(676, 117, -90, "k1"), head(700, 117, -90, "k1")]
    parts.append(arrow(744, 89, 769, 89, "kgood"))
    parts.append(words(757, 55, "only then", "plain middle"))
    parts.append(box(118, 386, 730, 50, [DIFFERENCE, REPEATED], "kbad apart"))
    return drawn(frame, "One verified step, from left to right", parts)


DIFFERENCE = "Where bits differ, the referee redoes that one microbatch from signed inputs and names exactly one party."
REPEATED = "Its neighbour, which has a copy, serves the stage, and the step begins again; no optimizer saw the lie."


GUARDS = (
    (
        ("verify", "pipeline"),
        ["owner: data, labels,", "keys, first and last stage"],
        ["workers of others", "serve middle stages"],
        ["must not change a result", "unseen; sees activations"],
        "signed commitments, audits by recompute, a referee",
    ),
    (
        ("seal", "split"),
        ["client: its data and", "the model's front"],
        ["machine that hosts the", "enclave; its disk, clock"],
        ["must not see activations,", "labels or adapters"],
        "attested enclave, AES-GCM, one order, counted states",
    ),
    (
        ("mask", "masked offload"),
        ["enclave: adapters,", "attention, norms"],
        ["accelerators multiply", "frozen layers"],
        ["must not see inputs, nor", "return a wrong product"],
        "one-time ring masks, Freivalds' check",
    ),
)


def trust() -> str:
    """Return the three guards, each on the border between what is trusted and what is not."""
    frame = PlotFrame(width=860.0, height=404.0)
    heads = {150: "trusted", 446: "not trusted", 668: "guarded so that it"}
    parts = [words(at, 30, head, "strong") for at, head in heads.items()]
    for index, (names, inside, outside, must, how) in enumerate(GUARDS):
        top = 56.0 + 116 * index
        parts += [words(14, top + 26, names[0], "strong"), words(14, top + 44, names[1], "plain")]
        parts.append(box(150, top, 200, 62, inside, "k0"))
        parts.append(box(446, top, 200, 62, outside, "k5 apart"))
        parts.append(path(f"M398 {top - 4}V{top + 66}", "ksoft apart"))
        parts += [arrow(350, top + 20, 444, top + 20, "ksoft"), arrow(446, top + 42, 352, top + 42, "ksoft")]
        parts += [words(668, top + 26 + 18 * at, one, "plain") for at, one in enumerate(must)]
        parts.append(words(398, top + 86, how, "plain middle"))
    return drawn(frame, "Three guards on the borders of trust", parts)


def guard_costs() -> str:
    """Return what each preset adds to the CPU time of an unguarded run, by part."""
    rows = [(str(row["preset"]), parts_of(row)) for row in json.loads(PRESETS.read_text())["rows"] if is_shown(row)]
    bars = part_bars(rows, lambda value: f"{value:.1f} %", "CPU time that each preset adds, by part")
    frame = PlotFrame(height=60.0 + 26.0 * len(rows))
    return standalone_svg(frame, bars)


def is_shown(row: dict[str, object]) -> bool:
    """Say whether a row is of a preset, at eight microbatches."""
    return row["preset"] is not None and row["M"] == 8


def parts_of(row: dict[str, float]) -> dict[str, float]:
    """Return what one preset costs, in per cent of an unguarded run's CPU time."""
    named = {
        "audits": ("part_audit",),
        "messages": ("part_hashing", "part_signing", "part_screen", "part_commit"),
        "shadows": ("part_shadow_upkeep", "part_state_digest"),
    }
    found = {name: 100 * sum(row[key] for key in keys) for name, keys in named.items()}
    return {**found, "not told apart": 100 * row["extra_compute"] - sum(found.values())}


MARKS: tuple[tuple[Shape, str], ...] = (("square", "k0"), ("diamond", "k1"), ("triangle", "k2"), ("dot", "k3"))


def leak_and_loss() -> str:
    """Return what the first foreign stage recovers over the loss that the owner's noise costs, by way of training."""
    rows = [row for row in summary() if row["model"] == "gpt2-small" and row["stage"] == 1 and row["guard"] != "sealed"]
    curves = {}
    for regime in dict.fromkeys(str(row["regime"]) for row in rows):
        points = [row for row in rows if row["regime"] == regime]
        base = points[0]["loss"]
        curves[regime] = [(100 * (row["loss"] / base - 1), 100 * row["tokens"]) for row in points]
    return curve_picture(
        curves, "extra loss on held-out text, per cent", "Tokens recovered over the loss that noise costs"
    )


def leak_and_work() -> str:
    """Return what a stage recovers of a full training over the owner's share of the work, by model."""
    plain = [row for row in summary() if (row["guard"], row["regime"]) == ("plaintext", "full")]
    curves = {
        f"{model}: tokens": [
            (100 * row["owner_cpu_share"], 100 * row["tokens"]) for row in plain if row["model"] == model
        ]
        for model in dict.fromkeys(str(row["model"]) for row in plain)
    }
    title = "Tokens that the first foreign stage recovers, over the owner's share of the work"
    return curve_picture(curves, "owner's share of processor time, per cent", title)


def summary() -> list[dict[str, Any]]:
    """Return the lines of the measurement of stages."""
    lines: list[dict[str, Any]] = json.loads(STAGES.read_text(encoding="utf-8"))["summary"]
    return lines


def curve_picture(curves: dict[str, list[tuple[float, float]]], x_label: str, title: str) -> str:
    """Return lines with a mark at each point, all from 0 to 100 per cent upwards."""
    frame = PlotFrame(height=320.0)
    places = [place for points in curves.values() for place, _ in points]
    x = AxisScale(min(0.0, *places), max(1.0, *places) * 1.03, frame.x_range)
    y = AxisScale(0.0, 100.0, frame.y_range)
    parts: list[str] = [draw_axes(frame, x, y, x_label, "tokens recovered, per cent")]
    items: list[tuple[Shape, str, str]] = []
    for (name, points), (shape, css) in zip(curves.items(), MARKS, strict=False):
        ordered = sorted(points)
        parts.append(draw_line(ordered, x, y, f"curve {css}"))
        parts += [draw_mark(shape, x(place), y(value), css) for place, value in ordered]
        items.append((shape, css, name))
    return standalone_svg(frame, draw_picture(frame, title, *parts, draw_legend(frame, items)))


def drawn(frame: PlotFrame, label: str, parts: list[Markup]) -> str:
    """Return a drawing as a file of its own."""
    group = make_element("g", {"class": "chart", "role": "img", "aria-label": label}, *parts)
    return standalone_svg(frame, Markup(f"<style>{_STYLE}</style>"), group)


def box(x: float, y: float, width: float, height: float, lines: list[str], css: str) -> Markup:
    """Return a box with one or two lines in its middle."""
    rect = make_element("rect", {"class": f"box {css}", "x": x, "y": y, "width": width, "height": height, "rx": 7})
    first = y + height / 2 + 4.5 - 9 * (len(lines) - 1)
    shown = [words(x + width / 2, first + 18 * at, one, "plain middle") for at, one in enumerate(lines)]
    return Markup(rect + "".join(shown))


def words(x: float, y: float, text: str, css: str) -> Markup:
    """Return one line of text."""
    return make_element("text", {"class": css, "x": x, "y": y}, text)


def path(shape: str, css: str) -> Markup:
    """Return a line."""
    return make_element("path", {"class": f"arrow {css}", "d": shape})


def arrow(x: float, y: float, to_x: float, to_y: float, css: str) -> Markup:
    """Return a straight arrow, along one axis."""
    turn = {(1, 0): 0, (-1, 0): 180, (0, 1): 90, (0, -1): -90}[sign(to_x - x), sign(to_y - y)]
    return Markup(path(f"M{x} {y}L{to_x} {to_y}", css) + head(to_x, to_y, turn, css))


def head(x: float, y: float, turn: int, css: str) -> Markup:
    """Return the head of an arrow."""
    return make_element(
        "path", {"class": f"arrow {css}", "d": "M-7 -4L0 0L-7 4", "transform": f"translate({x} {y}) rotate({turn})"}
    )


def sign(value: float) -> int:
    """Return the direction of a number."""
    return (value > 0) - (value < 0)


if __name__ == "__main__":
    main()
