"""Tables: stages and their parties, computed microbatches of each party, and rounds of each federated site."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from phalanx.report.figures import format_amount, format_count, format_duration, format_size, parse_number, short_text
from phalanx.report.read import Row, RunRecord
from phalanx.report.shell import make_section
from phalanx.report.svg import Markup, make_element

_MAX_PARTIES = 8
_MAX_PHASES = 16
_SHORT = 16
_LONG = 60
_WHOLE = ("process", "other_threads", "hashing", "signing", "wait")
_MAX_SETS = 64
_VALIDATION = {
    "loss_first": "Loss before training",
    "loss": "Loss after",
    "perplexity_first": "Perplexity before",
    "perplexity": "Perplexity after",
}
_NAMES = {"hashing": "hashing of the links", "signing": "signing of the links", "process": "the whole process"}


def make_table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> Markup:
    """Return a table; cells that are not markup are escaped."""
    head = make_element("tr", {}, *(make_element("th", {"scope": "col"}, name) for name in heads))
    body = [make_element("tr", {}, *map(_table_cell, row)) for row in rows]
    content = make_element("table", {"class": css}, make_element("thead", {}, head), make_element("tbody", {}, *body))
    return make_element("div", {"class": "scroll"}, content)


def _table_cell(content: str) -> Markup:
    """Return one cell; a name or a figure with its unit stays on one line, a sentence has room for a few words."""
    if isinstance(content, Markup) or _SHORT < len(content) < _LONG:
        return make_element("td", {}, content)
    return make_element("td", {"class": "short" if len(content) <= _SHORT else "long"}, content)


def stage_table(record: RunRecord) -> Markup | None:
    """Return the holder of each stage at the beginning and at the end of the run; None when the log does not say."""
    for event in record.events_of("run_started"):
        stages = event["body"].get("stages")
        if isinstance(stages, list) and stages:
            last = {short_text(e["body"].get("stage"), 10): e["body"].get("by") for e in record.events_of("takeover")}
            rows = [_stage_row(stage, last) for stage in stages[:256] if isinstance(stage, dict)]
            return make_table(["Stage", "Layers", "Parameters", "Held by", "At the end by", "Shadow at first"], rows)
    return None


def cost_table(record: RunRecord) -> Markup | None:
    """Return the CPU seconds of the first parties by phase, as they reported them; None when none did."""
    usage = record.summary.get("usage_cpu_s")
    seconds_of = {
        short_text(party, 70): seconds
        for party, seconds in list(usage.items() if isinstance(usage, dict) else ())[:_MAX_PARTIES]
        if isinstance(seconds, dict) and seconds
    }
    if not seconds_of:
        return None
    phases = {phase for seconds in seconds_of.values() for phase in seconds if phase not in _WHOLE}
    ranked = sorted(
        phases, key=lambda phase: (-sum(parse_number(s.get(phase)) or 0.0 for s in seconds_of.values()), phase)
    )
    parties = sorted(seconds_of)
    rows = [
        [
            short_text(_NAMES.get(phase, phase), 40),
            *(_format_seconds(seconds_of[party].get(phase)) for party in parties),
        ]
        for phase in (*ranked[:_MAX_PHASES], *_NAMES)
    ]
    return make_table(["CPU time", *parties], rows, "figures")


def validation_table(record: RunRecord) -> Markup | None:
    """Return a row for each further validation set, before and after; None where there is none."""
    sets = record.summary.get("validation_sets")
    rows = [
        [short_text(name, 40), *(format_amount(measures.get(key)) for key in _VALIDATION)]
        for name, measures in list(sets.items() if isinstance(sets, dict) else ())[:_MAX_SETS]
        if isinstance(measures, dict)
    ]
    return make_table(["Validation set", *_VALIDATION.values()], rows, "figures") if rows else None


def _format_seconds(value: Any) -> str:
    return "" if parse_number(value) is None else format_duration(value)


def _stage_row(stage: dict[str, Any], last: dict[str, Any]) -> list[str]:
    index, holder = short_text(stage.get("index"), 10), short_text(stage.get("holder"), 70)
    return [
        index,
        _format_layers(stage.get("layers")),
        format_count(stage.get("parameters")),
        holder,
        short_text(last[index], 70) if index in last else holder,
        short_text(stage.get("shadow"), 70),
    ]


def _format_layers(value: Any) -> str:
    ends = [parse_number(item) for item in value] if isinstance(value, list) else []
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        return f"{ends[0]:g} to {ends[1]:g}"
    text = short_text(value, 80)
    first, _, last_word = text.partition("-")
    return (
        first
        if first == last_word
        else text.replace("-", " to ")
        if first.isdecimal() and last_word.isdecimal()
        else text
    )


_MAX_SITES, _MAX_REASONS = 200, 6
_HEADS = ["Site", "Rounds", "Left out", "Training loss", "Norm", "Own loss before", "after", "Own accuracy", "Bytes"]


def sites_section(record: RunRecord) -> Markup | None:
    """Return a table of sites; None of a run without rounds."""
    rounds = [row for row in record.rounds if isinstance(row.get("sites"), dict) and "round" in row]
    if not rounds:
        return None
    measured = [row["sites"] for row in record.rounds if isinstance(row.get("sites"), dict) and "measured" in row]
    names = sorted({name for row in rounds for name in row["sites"]})
    rows = [_site_row(name, rounds, measured) for name in names[:_MAX_SITES]]
    sums = sum(len(row["sums"]) for row in rounds if isinstance(row.get("sums"), list))
    how = f"{format_count(sums)} secure sums; the owner saw no update." if sums else "The owner saw each update."
    note = "Losses and accuracies are claims of the sites."
    heads, epsilons = _HEADS, [_last_epsilon(name, rounds) for name in names[:_MAX_SITES]]
    if any(epsilons):
        heads, rows = [*heads, "Epsilon"], [[*row, epsilon] for row, epsilon in zip(rows, epsilons, strict=True)]
        note = f"{note} Epsilon is what each site has spent of its own rows, by its own ledger."
    elif (spent := parse_number(rounds[-1].get("epsilon"))) is not None:
        note = f"Its sums have spent epsilon {spent:.3f} of each site, and sites reveal nothing else."
    if len(names) > _MAX_SITES:
        note = f"{note} The table has the first {_MAX_SITES} of {format_count(len(names))} sites."
    remark = f"{format_count(len(rounds))} rounds. {how} {note}"
    return make_section("Sites", remark, make_table(heads, rows, "figures"))


def _last_epsilon(name: str, rounds: list[Row]) -> str:
    """Return the last epsilon that a site reported, or None."""
    shares = [share for row in rounds if isinstance(share := row["sites"].get(name), dict) and "epsilon" in share]
    return _last_figure(shares[-1:], "epsilon")


def _site_row(name: str, rounds: list[Row], measured: list[Row]) -> list[str]:
    shares = [share for row in rounds if isinstance(share := row["sites"].get(name), dict)]
    trained = [share for share in shares if "left_out" not in share]
    why = Counter(short_text(share["left_out"], 40) or "not reached" for share in shares if "left_out" in share)
    measured_rows = [
        share
        for row in measured
        if isinstance(share := row.get(name), dict) and parse_number(share.get("loss")) is not None
    ]
    moved = sum(
        parse_number(value) or 0.0
        for row in rounds
        if isinstance(row.get("bytes"), dict)
        for link, value in row["bytes"].items()
        if name in link.split(">")
    )
    return [
        short_text(name, 70),
        format_count(len(trained)),
        ", ".join(f"{reason} ({format_count(times)})" for reason, times in why.most_common(_MAX_REASONS)),
        _last_figure(trained[-1:], "loss"),
        _last_figure(trained[-1:], "norm"),
        _last_figure(measured_rows[:1], "loss"),
        _last_figure(measured_rows[-1:], "loss"),
        _last_figure(measured_rows[-1:], "accuracy"),
        format_size(moved),
    ]


def _last_figure(rows: list[dict[str, Any]], key: str) -> str:
    value = parse_number(rows[0].get(key)) if rows else None
    return "" if value is None else f"{value:.4g}"
