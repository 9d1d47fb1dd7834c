"""A plan as one page: the ranking, memory and time by part, a pipeline's timeline, and what it all rests on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from phalanx.planner.cluster.hardware import GIB
from phalanx.planner.cost.estimate import Estimate
from phalanx.planner.search.answer import PlanAnswer, assumptions
from phalanx.report.bars import part_bars, pipeline_chart
from phalanx.report.figures import amount, count, duration, plural, size, words
from phalanx.report.shell import section, shell, write_page
from phalanx.report.svg import Markup, element
from phalanx.report.tables import table

_SHOWN = 12
_DAY_S = 86_400.0
_MAX_REASONS = 40
_MANY = 1e9
_HEADS = ("Layout", "m", "Recomputed", "Memory", "Step", "Tokens/s", "MFU", "Takes", "US dollars")


def write_plan(path: Path, answer: PlanAnswer) -> Path:
    """Write a plan as one self-contained page.

    Raises:
        InputError: It cannot be written there.
    """
    return write_page(path, render_plan(answer))


def render_plan(answer: PlanAnswer) -> str:
    """Return the whole page."""
    shown = answer.ranking.valid[:_SHOWN]
    sections = [_top(answer)]
    if shown:
        sections += [_ranking(answer, shown), _memory(shown), _time(shown)]
    sections += [part for part in (_sent(shown), _pipeline(answer), _refused(answer)) if part is not None]
    sections.append(_assumptions(answer))
    return shell(f"{words(answer.question.model, 80)} · a Phalanx plan", sections)


def _top(answer: PlanAnswer) -> Markup:
    question, best = answer.question, answer.best
    devices = " or ".join(count(number) for number in question.counts)
    where = f"{devices} of {question.cluster.title or 'a cluster'}"
    headline = f"{best.layout}" if best is not None else "No layout can be used"
    tiles = [("Model", f"{count(question.shape.parameters)} parameters", question.shape.family)]
    if best is not None:
        tiles += [
            ("Speed", f"{count(best.tokens_per_s)} tokens/s", f"{100 * best.mfu:.1f} % of the peak (MFU)"),
            (
                "Global batch",
                f"{count(best.recipe.sequences)} sequences",
                f"of {count(best.recipe.sequence_length)} tokens",
            ),
            ("Memory a rank", size(best.memory.total), f"of {size(best.limit)} usable"),
            ("Bubble", f"{100 * best.step.bubble / best.step.total:.1f} %", "of a step"),
            *_total_tiles(best),
        ]
    cards = [
        element(
            "div",
            {"class": "tile"},
            *(element("div", {"class": css}, part) for css, part in zip(("name", "value", "name"), tile, strict=True)),
        )
        for tile in tiles
    ]
    return element(
        "header",
        {},
        element(
            "p", {"class": "run"}, "Phalanx plan: ", element("bdi", {}, words(question.model, 120)), f" on {where}"
        ),
        element("h1", {}, headline),
        element("div", {"class": "tiles"}, *cards),
    )


def _total_tiles(best: Estimate) -> list[tuple[str, str, str]]:
    totals = best.totals
    if totals is None:
        return []
    tiles = [("Time", _span(totals.days), f"{_tokens(totals.tokens)} tokens, goodput {totals.goodput:.2f}")]
    if totals.energy_kwh is not None:
        tiles.append(("Energy", f"{amount(totals.energy_kwh)} kWh", "at the makers' stated power, an upper bound"))
    if totals.cost_usd is not None:
        tiles.append(("Cost", _dollars(totals.cost_usd), f"{count(totals.device_hours)} device-hours, quoted prices"))
    return tiles


def _tokens(number: float) -> str:
    return amount(number) if number >= _MANY else count(number)


def _span(days: float) -> str:
    return f"{amount(days)} days" if days >= 1 else duration(days * _DAY_S)


def _ranking(answer: PlanAnswer, shown: tuple[Estimate, ...]) -> Markup:
    rows = [
        [
            _name(found),
            count(found.recipe.microbatches),
            found.recipe.checkpointing,
            size(found.memory.total),
            duration(found.step.total),
            count(found.tokens_per_s),
            f"{100 * found.mfu:.1f} %",
            _span(found.totals.days) if found.totals is not None else "not known",
            _in_one_line(_dollars(found.totals.cost_usd))
            if found.totals is not None and found.totals.cost_usd
            else "not known",
        ]
        for found in shown
    ]
    rest = len(answer.ranking.valid) - len(shown)
    which = f"The best {len(shown)} of {plural(len(answer.ranking.valid), 'layout')}" if rest > 0 else "Every layout"
    remark = f"{which} that can be used. m: microbatches of each data parallel rank."
    return section("Ranking", remark, table(*_told(_HEADS, rows, "not known")))


def _memory(shown: tuple[Estimate, ...]) -> Markup:
    rows = _used([(_name(found), {key: value / GIB for key, value in found.memory.parts().items()}) for found in shown])
    limit = min(found.limit for found in shown) / GIB
    drawn = part_bars(rows, lambda value: f"{value:.3g} GiB", "Memory of each layout by part", limit)
    return section("Memory a rank", "The rank that needs most, at the worst moment of a step.", drawn)


def _time(shown: tuple[Estimate, ...]) -> Markup:
    kept = _used([(_name(found), found.step.parts()) for found in shown])
    hidden = max(found.step.hidden for found in shown)
    remark = f"Exchange beside the computation takes no time of its own; at most {duration(hidden)} are hidden so."
    return section("Time of a step", remark, part_bars(kept, duration, "Seconds of a step by part"))


def _used(rows: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """Leave out parts that no row has."""
    used = [part for part in rows[0][1] if any(parts[part] > 0 for _, parts in rows)]
    return [(name, {part: parts[part] for part in used}) for name, parts in rows]


def _sent(shown: tuple[Estimate, ...]) -> Markup | None:
    sent = [(found, found.sent) for found in shown if found.sent is not None]
    if not sent:
        return None
    rows = [[_name(found), *(size(one) if one else "nothing" for one in astuple(traffic))] for found, traffic in sent]
    remark = "By one rank in a step, beside what tensor, context and pipeline parallel ranks exchange."
    return section("Bytes sent", remark, table(*_told(_SENT, rows, "nothing")))


def _told(heads: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> tuple[list[str], list[list[str]]]:
    """Leave out columns that say the same nothing in every row."""
    kept = [at for at in range(len(heads)) if any(row[at] != nothing for row in rows)]
    return [heads[at] for at in kept], [[row[at] for at in kept] for row in rows]


_SENT = ("Layout", "To copies", "Between groups", "Between islands, on average")


def _pipeline(answer: PlanAnswer) -> Markup | None:
    found = answer.pipeline()
    if found is None:
        return None
    estimate, timeline = found
    layers = f" Layers of the stages: {', '.join(map(str, estimate.layers))}." if estimate.layers else ""
    devices = f" Devices: {', '.join(estimate.devices)}." if estimate.devices else ""
    remark = (
        f"{estimate.layout}: the first microbatches of a step; {100 * timeline.bubble:.1f} % of what is shown is idle."
        f"{layers}{devices}"
    )
    return section("Pipeline", remark, pipeline_chart(timeline))


def _refused(answer: PlanAnswer) -> Markup | None:
    refused = answer.ranking.refused
    if not refused:
        return None
    reasons = Counter(found.reason for found in refused)
    first = {found.reason: str(found.layout) for found in reversed(refused)}
    rows = [[first[reason], count(number), words(reason, 300)] for reason, number in reasons.most_common(_MAX_REASONS)]
    return section("Refused", f"{plural(len(refused), 'layout')}, equal reasons together.", table(_REFUSED, rows))


_REFUSED = ("For example", "Layouts", "Reason")


def _assumptions(answer: PlanAnswer) -> Markup:
    found: dict[str, Any] = assumptions(answer.question.cluster)
    devices, sources = found.pop("devices"), found.pop("sources")
    rows = [[key.replace("_", " "), words(value, 300)] for key, value in found.items()]
    for name, device in devices.items():
        figures = {key: value for key, value in device.items() if key not in ("sources", "price") and value is not None}
        rows.append([name, words(figures, 400)])
        price = device["price"]
        rows.append([f"{name}, price", "not known" if price is None else words(price, 400)])
        sources = [*device["sources"], *sources]
    rows += [["source", f"{source['title']}; {source['url']}; {source['date']}"] for source in sources]
    return section("What it rests on", "A plan is as good as these figures.", table(["Figure", "Value"], rows))


_UNITS = ((1e6, " million"), (1e3, " thousand"))


def _name(found: Estimate) -> str:
    return str(found.layout)


def _in_one_line(text: str) -> str:
    """Return a cell's text with spaces that no line breaks at; a tile is too narrow for it."""
    return text.replace(" ", "\u00a0")


def _dollars(cost: tuple[float, float]) -> str:
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if cost[1] >= scale), (1.0, ""))
    low, high = (f"{value / scale:.3g}" for value in cost)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
