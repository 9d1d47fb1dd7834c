"""Verdicts with their evidence, stages, and what happened when, as tables."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import PurePath
from typing import Any

from phalanx.report.figures import amount, count, number, words
from phalanx.report.markup import Markup, element
from phalanx.report.read import RunRecord

_MAX_EVENTS = 400
_LOUD = {
    "verdict": "bad",
    "evicted": "bad",
    "alarm": "warn",
    "screen_hit": "warn",
    "takeover": "good",
    "step_redone": "good",
    "run_completed": "good",
}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> Markup:
    """Return a table; cells that are not markup are escaped."""
    head = element("tr", {}, *(element("th", {"scope": "col"}, name) for name in heads))
    body = [element("tr", {}, *(element("td", {}, cell) for cell in row)) for row in rows]
    whole = element("table", {"class": css}, element("thead", {}, head), element("tbody", {}, *body))
    return element("div", {"class": "scroll"}, whole)


def verdict_list(record: RunRecord) -> Markup:
    """Return one block per verdict that opens to what it rests on."""
    verdicts = record.events_of("verdict")
    if not verdicts:
        known = "No verdict was given in this run." if record.events else "Not known: there is no audit log."
        return element("p", {"class": "quiet"}, known)
    return element("div", {}, *(_verdict(event["body"], record) for event in verdicts[:_MAX_EVENTS]))


def stage_table(record: RunRecord) -> Markup | None:
    """Return who holds which stage, as the run began; None when the log does not say."""
    for event in record.events_of("run_started"):
        stages = event["body"].get("stages")
        if isinstance(stages, list) and stages:
            rows = [
                [
                    words(stage.get("index"), 10),
                    _layers(stage.get("layers")),
                    count(stage.get("parameters")),
                    words(stage.get("holder"), 70),
                    words(stage.get("shadow"), 70),
                ]
                for stage in stages[:256]
                if isinstance(stage, dict)
            ]
            return table(["Stage", "Layers", "Parameters", "Held by", "Shadow"], rows)
    return None


def timeline(record: RunRecord) -> Markup:
    """Return the events with the seconds since the first one; a run of equal kinds is folded."""
    start = _moment(record.events[0]) if record.events else None
    rows: list[list[str]] = []
    for group in _folded(record.events)[:_MAX_EVENTS]:
        event = group[0]
        moment = _moment(event)
        since = f"+{(moment - start).total_seconds():.1f} s" if moment and start else ""
        kind = element("span", {"class": f"kind {_LOUD.get(event['kind'], '')}"}, words(event["kind"], 40))
        times = f" × {len(group)}, last: " if len(group) > 1 else ""
        rows.append([since, kind, times + describe(group[-1]["body"])])
    return table(["Time", "Event", "Details"], rows, "timeline")


def describe(body: dict[str, Any]) -> str:
    """Return the details of an event in one line."""
    if isinstance(body.get("reason"), str):
        return words(body["reason"])
    shown = {key: value for key, value in body.items() if key != "stages" and value is not None}
    return words(shown)


def _verdict(body: dict[str, Any], record: RunRecord) -> Markup:
    guilty = element("strong", {}, words(body.get("party"), 80))
    what = words(body.get("reason")) if body.get("reason") else "no reason given"
    summary = element("summary", {}, guilty, " · ", what)
    where = [f"{key} {words(body[key], 20)}" for key in ("stage", "step", "microbatch") if key in body]
    rows = [
        ["Where", ", ".join(where)],
        ["Offence", words(body.get("offence"), 60)],
        ["Direction", words(body.get("direction"), 60)],
        ["Distance", _distance(body)],
        ["Accused by", words(body.get("accuser"), 80)],
    ]
    return element("details", {"class": "verdict"}, summary, table(["", ""], rows), _evidence(body, record))


def _distance(body: dict[str, Any]) -> str:
    distance, allowed = number(body.get("distance")), number(body.get("allowed"))
    if distance is None:
        return "not a number: the digests differ, or the tensor is not finite"
    return f"{amount(distance, 3)}, allowed {amount(allowed, 3)}"


def _evidence(body: dict[str, Any], record: RunRecord) -> Markup:
    name = body.get("evidence")
    if not isinstance(name, str) or not name:
        return element("p", {"class": "quiet"}, "No evidence file is named.")
    # only the last part counts: files outside the evidence directory are never shown
    text = record.evidence.get(PurePath(name).name)
    if text is None:
        return element("p", {"class": "quiet"}, f"Evidence file {words(name, 120)} is missing.")
    shown = element("pre", {}, _indented(text))
    return element("details", {}, element("summary", {}, f"Evidence: {words(name, 120)}"), shown)


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _layers(value: Any) -> str:
    ends = [number(item) for item in value] if isinstance(value, list) else []
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        return f"{ends[0]:g} to {ends[1]:g}"
    return words(value, 80)


def _folded(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        loud = event["kind"] in ("verdict", "evicted", "takeover", "party_joined", "stage_assigned")
        if groups and groups[-1][0]["kind"] == event["kind"] and not loud:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _moment(event: dict[str, Any]) -> datetime | None:
    value = event.get("time")
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo else None
        seconds = number(value)
        return None if seconds is None else datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        return None
