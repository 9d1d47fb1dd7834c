"""Tables: stages with the parties that serve them, and what each party computed."""

from collections.abc import Sequence
from typing import Any

from phalanx.report.figures import amount, count, duration, number, words
from phalanx.report.markup import Markup, element
from phalanx.report.read import RunRecord

_MAX_PARTIES = 8
_MAX_PHASES = 16
_SHORT = 16
_LONG = 60
_WHOLE = ("process", "hashing", "signing", "wait")
_MAX_SETS = 64
_VALIDATION = {
    "loss_first": "Loss before training",
    "loss": "Loss after",
    "perplexity_first": "Perplexity before",
    "perplexity": "Perplexity after",
}
_NAMES = {"hashing": "hashing of the links", "signing": "signing of the links", "process": "the whole process"}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> Markup:
    """Return a table; cells that are not markup are escaped."""
    head = element("tr", {}, *(element("th", {"scope": "col"}, name) for name in heads))
    body = [element("tr", {}, *map(_cell, row)) for row in rows]
    whole = element("table", {"class": css}, element("thead", {}, head), element("tbody", {}, *body))
    return element("div", {"class": "scroll"}, whole)


def _cell(content: str) -> Markup:
    """Return one cell; a name or a figure with its unit stays on one line, a sentence has room for a few words."""
    if isinstance(content, Markup) or _SHORT < len(content) < _LONG:
        return element("td", {}, content)
    return element("td", {"class": "short" if len(content) <= _SHORT else "long"}, content)


def stage_table(record: RunRecord) -> Markup | None:
    """Return the holder of each stage at the beginning and at the end of the run; None when the log does not say."""
    for event in record.events_of("run_started"):
        stages = event["body"].get("stages")
        if isinstance(stages, list) and stages:
            last = {words(e["body"].get("stage"), 10): e["body"].get("by") for e in record.events_of("takeover")}
            rows = [_stage_row(stage, last) for stage in stages[:256] if isinstance(stage, dict)]
            return table(["Stage", "Layers", "Parameters", "Held by", "At the end by", "Shadow at first"], rows)
    return None


def cost_table(record: RunRecord) -> Markup | None:
    """Return the CPU seconds of the first parties by phase, as they reported them; None when none did."""
    usage = record.summary.get("usage_cpu_s")
    known = {
        words(party, 70): seconds
        for party, seconds in list(usage.items() if isinstance(usage, dict) else ())[:_MAX_PARTIES]
        if isinstance(seconds, dict) and seconds
    }
    if not known:
        return None
    phases = {phase for seconds in known.values() for phase in seconds if phase not in _WHOLE}
    ranked = sorted(phases, key=lambda phase: (-sum(number(s.get(phase)) or 0.0 for s in known.values()), phase))
    parties = sorted(known)
    rows = [
        [words(_NAMES.get(phase, phase), 40), *(_seconds(known[party].get(phase)) for party in parties)]
        for phase in (*ranked[:_MAX_PHASES], *_NAMES)
    ]
    return table(["CPU time", *parties], rows, "figures")


def validation_table(record: RunRecord) -> Markup | None:
    """Return a row for each further validation set, before and after; None where there is none."""
    sets = record.summary.get("validation_sets")
    rows = [
        [words(name, 40), *(amount(found.get(key)) for key in _VALIDATION)]
        for name, found in list(sets.items() if isinstance(sets, dict) else ())[:_MAX_SETS]
        if isinstance(found, dict)
    ]
    return table(["Validation set", *_VALIDATION.values()], rows, "figures") if rows else None


def _seconds(value: Any) -> str:
    return "" if number(value) is None else duration(value)


def _stage_row(stage: dict[str, Any], last: dict[str, Any]) -> list[str]:
    index, holder = words(stage.get("index"), 10), words(stage.get("holder"), 70)
    return [
        index,
        _layers(stage.get("layers")),
        count(stage.get("parameters")),
        holder,
        words(last[index], 70) if index in last else holder,
        words(stage.get("shadow"), 70),
    ]


def _layers(value: Any) -> str:
    ends = [number(item) for item in value] if isinstance(value, list) else []
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        return f"{ends[0]:g} to {ends[1]:g}"
    text = words(value, 80)
    first, _, end = text.partition("-")
    return first if first == end else text.replace("-", " to ") if first.isdecimal() and end.isdecimal() else text
