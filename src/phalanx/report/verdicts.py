"""Verdicts, each with what its evidence holds."""

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from phalanx.report.figures import format_amount, parse_number, short_text
from phalanx.report.read import RunRecord
from phalanx.report.svg import Attributes, Markup, make_element
from phalanx.report.tables import make_table

_MAX_VERDICTS = 400
_OFFENCES = {
    "message": "sent a tensor that differs from the recomputed one",
    "accusation": "accused a stage whose tensor equals the recomputed one",
    "collusion": "vouched for a tensor that differs from the recomputed one",
    "equivocation": "sent contradicting statements to two parties",
    "forgery": "committed to an input that nobody sent",
    "gradient": "another weight gradient or norm than it sent or computed",
    "state": "a state that does not follow from the agreed update",
    "shape": "sent another shape or type than the run requires",
    "transfer": "did not send its committed data",
}
_WHY_SIGNED = {
    "output": "the disputed message",
    "input_forward": "its input",
    "input_backward": "the gradient it was computed from",
    "report": "the auditor's own result",
    "commit": "the stage's commitment to the step",
    "gradient_held": "the shadow's copy of the weight gradient",
    "step_audited": "the weight gradient that an audit of the whole step gave",
    "state_holder": "the weights, as the stage signed them",
    "state_shadow": "the weights, as its shadow signed them",
}


def verdict_list(record: RunRecord) -> Markup:
    """Return one block per verdict that opens to its evidence; the first is open."""
    verdicts = record.events_of("verdict")
    if not verdicts:
        note = "No verdict was given in this run." if record.events else "Not known: there is no audit log."
        return make_element("p", {"class": "quiet"}, note)
    blocks = [_verdict_block(event["body"], record, first=n == 0) for n, event in enumerate(verdicts[:_MAX_VERDICTS])]
    return make_element("div", {}, *blocks)


def _verdict_block(body: Mapping[str, Any], record: RunRecord, *, first: bool) -> Markup:
    guilty = make_element("strong", {}, short_text(body.get("party"), 80))
    what = short_text(body.get("reason")) if body.get("reason") else "no reason given"
    summary = make_element("summary", {}, guilty, " · ", what)
    places = [
        f"{key} {short_text(body[key], 20)}" for key in ("step", "stage", "microbatch") if body.get(key) is not None
    ]
    offence = short_text(body.get("offence"), 60)
    meaning = _OFFENCES.get(offence)
    rows = [
        ["Where", ", ".join([*places, short_text(body["direction"], 20)] if body.get("direction") else places)],
        ["Offence", f"{offence}: {meaning}" if meaning else offence],
        ["Accused by", short_text(body.get("accuser"), 80)],
        *([["Distance", _format_distance(body)]] if offence in ("message", "accusation") else []),
    ]
    attributes: Attributes = {"class": "verdict", **({"open": ""} if first else {})}
    return make_element("details", attributes, summary, make_table(["", ""], rows), _evidence_block(body, record))


def _format_distance(body: Mapping[str, Any]) -> str:
    distance, allowed = parse_number(body.get("distance")), parse_number(body.get("allowed"))
    if distance is None:
        return "not a number: the digests differ, or the tensor is not finite"
    equal = " (equal bits inside one numeric class)" if allowed == 0 else ""
    return f"{format_amount(distance, 3)}, allowed {format_amount(allowed, 3)}{equal}"


def _evidence_block(body: Mapping[str, Any], record: RunRecord) -> Markup:
    name = body.get("evidence")
    if not isinstance(name, str) or not name:
        return make_element("p", {"class": "quiet"}, "No evidence file is named.")
    # only the last part counts: files outside the evidence directory are never shown
    text = record.evidence.get(PurePath(name).name)
    if text is None:
        return make_element("p", {"class": "quiet"}, f"Evidence file {short_text(name, 120)} is missing.")
    rows = _signed_rows(text)
    signed = make_table(["Signed header", "What it shows", "Signed by"], rows) if rows else ""
    command = make_element("code", {}, short_text(f"phalanx audit explain {name}", 160))
    check = make_element("p", {"class": "remark"}, "Check it offline, in the run directory: ", command)
    digest = body.get("evidence_sha256")
    digest_rows = [["SHA-256", make_element("code", {}, short_text(digest, 80))]] if isinstance(digest, str) else []
    title = make_element("summary", {}, f"Evidence: {short_text(name, 120)}")
    return make_element(
        "details", {"open": ""}, title, signed, make_table(["", ""], digest_rows) if digest_rows else "", check
    )


def _signed_rows(text: str) -> list[list[str]]:
    """List the signatures as the file names them; nothing is checked here."""
    try:
        headers = json.loads(text).get("headers")
    except (ValueError, RecursionError, AttributeError):
        return []
    rows = []
    for role, signed in sorted(headers.items())[:32] if isinstance(headers, dict) else ():
        rows.append([short_text(role, 40), _WHY_SIGNED.get(role, "what was shown or contradicted"), _sender_of(signed)])
    return rows


def _sender_of(signed: Any) -> str:
    try:
        return short_text(json.loads(signed["header"])["sender"], 80)
    except (ValueError, RecursionError, KeyError, TypeError):
        return "not readable"
