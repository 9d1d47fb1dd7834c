"""A plan as one page: the ranking, memory and time by part, a pipeline's timeline, and the sources of all figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from phalanx.planner.cluster.hardware import GIB
from phalanx.planner.cost.estimate import Estimate
from phalanx.planner.search.answer import PlanAnswer, list_assumptions
from phalanx.report.bars import part_bars, pipeline_chart
from phalanx.report.figures import format_amount, format_count, format_duration, format_plural, format_size, short_text
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import Markup, make_element
from phalanx.report.tables import make_table

_SHOWN = 12
_DAY_S = 86_400.0
_MAX_REASONS = 40
_MANY = 1e9
_HEADS = ("Layout", "m", "Recomputed", "Memory", "Step", "Tokens/s", "MFU", "Takes", "US dollars")


def write_plan(path: Path, answer: PlanAnswer) -> Path:
    """Write a plan as one self-contained page."""
    return write_page(path, render_plan(answer))


def render_plan(answer: PlanAnswer) -> str:
    """Return the whole page."""
    shown = answer.ranking.valid[:_SHOWN]
    sections = [_plan_top(answer)]
    if shown:
        sections += [_ranking_section(answer, shown), _memory_section(shown), _time_section(shown)]
    sections += [
        part
        for part in (_traffic_section(shown), _pipeline_section(answer), _refused_section(answer))
        if part is not None
    ]
    sections.append(_assumption_section(answer))
    return page_shell(f"{short_text(answer.question.model, 80)} · a Phalanx plan", sections)


def _plan_top(answer: PlanAnswer) -> Markup:
    question, best = answer.question, answer.best_layout
    devices = " or ".join(format_count(number) for number in question.counts)
    place = f"{devices} of {question.cluster.title or 'a cluster'}"
    headline = f"{best.layout}" if best is not None else "No usable layout"
    tiles = [("Model", f"{format_count(question.shape.num_parameters)} parameters", question.shape.family)]
    if best is not None:
        tiles += [
            ("Speed", f"{format_count(best.tokens_per_s)} tokens/s", f"{100 * best.mfu:.1f} % of the peak (MFU)"),
            (
                "Global batch",
                f"{format_count(best.recipe.sequences)} sequences",
                f"of {format_count(best.recipe.sequence_length)} tokens",
            ),
            ("Memory a rank", format_size(best.memory.total_bytes), f"of {format_size(best.limit)} usable"),
            ("Bubble", f"{100 * best.step.bubble / best.step.total_seconds:.1f} %", "of a step"),
            *_total_tiles(best),
        ]
    cards = [
        make_element(
            "div",
            {"class": "tile"},
            *(
                make_element("div", {"class": css}, part)
                for css, part in zip(("name", "value", "name"), tile, strict=True)
            ),
        )
        for tile in tiles
    ]
    return make_element(
        "header",
        {},
        make_element(
            "p",
            {"class": "run"},
            "Phalanx plan: ",
            make_element("bdi", {}, short_text(question.model, 120)),
            f" on {place}",
        ),
        make_element("h1", {}, headline),
        make_element("div", {"class": "tiles"}, *cards),
    )


def _total_tiles(best: Estimate) -> list[tuple[str, str, str]]:
    totals = best.totals
    if totals is None:
        return []
    tiles = [
        ("Time", _format_days(totals.days), f"{_format_tokens(totals.tokens)} tokens, goodput {totals.goodput:.2f}")
    ]
    if totals.energy_kwh is not None:
        tiles.append(
            ("Energy", f"{format_amount(totals.energy_kwh)} kWh", "at the makers' stated power, an upper bound")
        )
    if totals.cost_usd is not None:
        tiles.append(
            (
                "Cost",
                _format_dollars(totals.cost_usd),
                f"{format_count(totals.device_hours)} device-hours, quoted prices",
            )
        )
    if totals.project_usd is not None:
        people = f"failed runs, and {format_amount(totals.people_usd or 0.0)} dollars of people"
        tiles.append(("Project", _format_dollars(totals.project_usd), people))
    return tiles


def _format_tokens(number: float) -> str:
    return format_amount(number) if number >= _MANY else format_count(number)


def _format_days(days: float) -> str:
    return f"{format_amount(days)} days" if days >= 1 else format_duration(days * _DAY_S)


def _ranking_section(answer: PlanAnswer, shown: tuple[Estimate, ...]) -> Markup:
    rows = [
        [
            _layout_name(candidate),
            format_count(candidate.recipe.microbatches),
            candidate.recipe.checkpointing,
            format_size(candidate.memory.total_bytes),
            format_duration(candidate.step.total_seconds),
            format_count(candidate.tokens_per_s),
            f"{100 * candidate.mfu:.1f} %",
            _format_days(candidate.totals.days) if candidate.totals is not None else "not known",
            _format_dollars(candidate.totals.cost_usd).replace(" ", "\u00a0")
            if candidate.totals is not None and candidate.totals.cost_usd
            else "not known",
        ]
        for candidate in shown
    ]
    rest = len(answer.ranking.valid) - len(shown)
    which = (
        f"The best {len(shown)} of {format_plural(len(answer.ranking.valid), 'layout')}" if rest > 0 else "Every layout"
    )
    remark = f"{which} that are usable. m: microbatches of each data parallel rank."
    return make_section("Ranking", remark, make_table(*_drop_empty_columns(_HEADS, rows, "not known")))


def _memory_section(shown: tuple[Estimate, ...]) -> Markup:
    rows = _drop_empty_parts(
        [
            (_layout_name(candidate), {key: value / GIB for key, value in candidate.memory.parts_by_name().items()})
            for candidate in shown
        ]
    )
    limit = min(candidate.limit for candidate in shown) / GIB
    drawn = part_bars(rows, lambda value: f"{value:.3g} GiB", "Memory of each layout by part", limit)
    return make_section("Memory a rank", "The rank with the most, at the peak of a step.", drawn)


def _time_section(shown: tuple[Estimate, ...]) -> Markup:
    parts = _drop_empty_parts([(_layout_name(candidate), candidate.step.parts_by_name()) for candidate in shown])
    hidden = max(candidate.step.hidden for candidate in shown)
    remark = f"Exchange beside the computation takes no extra time; at most {format_duration(hidden)} are hidden."
    return make_section("Time of a step", remark, part_bars(parts, format_duration, "Seconds of a step by part"))


def _drop_empty_parts(rows: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    used = [part for part in rows[0][1] if any(parts[part] > 0 for _, parts in rows)]
    return [(name, {part: parts[part] for part in used}) for name, parts in rows]


def _traffic_section(shown: tuple[Estimate, ...]) -> Markup | None:
    sent = [(candidate, candidate.sent) for candidate in shown if candidate.sent is not None]
    if not sent:
        return None
    rows = [
        [_layout_name(candidate), *(format_size(bytes_of) if bytes_of else "nothing" for bytes_of in astuple(traffic))]
        for candidate, traffic in sent
    ]
    remark = "By one rank in a step, beside what tensor, context and pipeline parallel ranks exchange."
    return make_section("Bytes sent", remark, make_table(*_drop_empty_columns(_SENT, rows, "nothing")))


def _drop_empty_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], nothing: str
) -> tuple[list[str], list[list[str]]]:
    """Leave out columns that say the same nothing in every row."""
    columns = [column for column in range(len(heads)) if any(row[column] != nothing for row in rows)]
    return [heads[column] for column in columns], [[row[column] for column in columns] for row in rows]


_SENT = ("Layout", "To copies", "Between groups", "Between islands, on average")


def _pipeline_section(answer: PlanAnswer) -> Markup | None:
    pipeline = answer.best_pipeline()
    if pipeline is None:
        return None
    estimate, timeline = pipeline
    layers = f" Layers of the stages: {', '.join(map(str, estimate.layers))}." if estimate.layers else ""
    devices = f" Devices: {', '.join(estimate.devices)}." if estimate.devices else ""
    remark = (
        f"{estimate.layout}: the first microbatches of a step; {100 * timeline.bubble_share:.1f} % of the shown time "
        f"is idle.{layers}{devices}"
    )
    return make_section("Pipeline", remark, pipeline_chart(timeline))


def _refused_section(answer: PlanAnswer) -> Markup | None:
    refused = answer.ranking.refused
    if not refused:
        return None
    reasons = Counter(layout.reason for layout in refused)
    first = {layout.reason: str(layout.layout) for layout in reversed(refused)}
    rows = [
        [first[reason], format_count(number), short_text(reason, 300)]
        for reason, number in reasons.most_common(_MAX_REASONS)
    ]
    return make_section(
        "Refused", f"{format_plural(len(refused), 'layout')}, equal reasons together.", make_table(_REFUSED, rows)
    )


_REFUSED = ("For example", "Layouts", "Reason")


def _assumption_section(answer: PlanAnswer) -> Markup:
    facts: dict[str, Any] = list_assumptions(answer.question.cluster)
    devices, sources = facts.pop("devices"), facts.pop("sources")
    rows = [[key.replace("_", " "), short_text(value, 300)] for key, value in facts.items()]
    for name, device in devices.items():
        figures = {key: value for key, value in device.items() if key not in ("sources", "price") and value is not None}
        rows.append([name, short_text(figures, 400)])
        price = device["price"]
        rows.append([f"{name}, price", "not known" if price is None else short_text(price, 400)])
        sources = [*device["sources"], *sources]
    rows += [["source", f"{source['title']}; {source['url']}; {source['date']}"] for source in sources]
    return make_section("Assumptions", "A plan is as good as these figures.", make_table(["Figure", "Value"], rows))


_UNITS = ((1e6, " million"), (1e3, " thousand"))


def _layout_name(estimate: Estimate) -> str:
    return str(estimate.layout)


def _format_dollars(cost: tuple[float, float]) -> str:
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if cost[1] >= scale), (1.0, ""))
    low, high = (f"{value / scale:.3g}" for value in cost)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
