"""The timeline of a run, in sentences."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from phalanx.report.figures import parse_number, short_text
from phalanx.report.read import RunRecord
from phalanx.report.svg import Markup, make_element
from phalanx.report.tables import make_table

_MAX_EVENTS = 400
_LOUD = {
    "verdict": "bad",
    "evicted": "bad",
    "lost": "bad",
    "replaced": "bad",
    "link_led": "warn",
    "revoked": "bad",
    "refused": "bad",
    "verdict_refused": "warn",
    "alarm": "warn",
    "screen_hit": "warn",
    "fault": "warn",
    "drift": "warn",
    "doubts_not_followed": "warn",
    "in_doubt": "bad",
    "distrusted": "warn",
    "state_not_kept": "warn",
    "link_broken": "warn",
    "not_let_in": "warn",
    "takeover": "good",
    "fell_back": "warn",
    "guarantee_weaker": "warn",
    "batch_skipped": "warn",
    "spike_attributed": "warn",
    "client_refused": "warn",
    "client_evidence_refused": "warn",
    "client_excluded": "bad",
    "checkpoint_failed": "warn",
    "checkpoint_not_copied": "warn",
    "journal_failed": "warn",
    "memory_short": "warn",
    "older_accepted": "warn",
    "step_redone": "good",
    "run_completed": "good",
}
_ONE_BY_ONE = (
    "guarantees",
    "guarantee_weaker",
    "verdict",
    "in_doubt",
    "distrusted",
    "evicted",
    "client_excluded",
    "revoked",
    "lost",
    "replaced",
    "left",
    "takeover",
    "fell_back",
    "party_joined",
    "stage_assigned",
)
_SENTENCES = {
    "run_started": "from step {step}",
    "run_resumed": "from step {step}, from the last checkpoint",
    "party_joined": "{party} from {address}, numeric class {class}",
    "screen_hit": "step {step}: {direction} of stage {source}, microbatch {microbatch}: {reason}; audited before use",
    "client_refused": "step {step}: the data of {client} is ignored: {reason}, {figure} of at most {bound}",
    "client_excluded": "step {step}: {client} is excluded: {reason}, {figure} of at most {bound}",
    "guarantees": "from step {step} on: {said}",
    "guarantee_weaker": "step {step}: stage {stage} is now checked less ({now}, before {before}): {meaning}",
    "alarm": "step {step}: the result of {accuser} differs from that of stage {stage}",
    "dismissed": "step {step}: the referee finds both within tolerance at stage {stage}, microbatch {microbatch}",
    "drift": "step {step}: the results of {party} at stage {stage} drift ({direction}); audited in full from now on",
    "gradient_doubted": "step {step}: {auditor} doubts the weight gradient of stage {stage}, which is unusual and "
    "is recomputed, although honest ones may be unusual as well ({reason})",
    "doubts_not_followed": "step {step}: {auditor} repeatedly doubted stage {stage}, which was right; from now on "
    "one step in {steps_per_doubt} is recomputed for it",
    "in_doubt": "stage {stage}: steps {steps} were computed by {party} and not recomputed in full",
    "verdict": "step {step}: {party} is guilty: {reason}",
    "verdict_refused": "step {step}: the evidence against {party} is invalid, nobody is evicted: {why}",
    "evicted": "{party} is excluded from the run",
    "revoked": "the owner has revoked the certificate of {party}: {reason}",
    "lost": "{party} is lost",
    "replaced": "step {step}: {party} is lost, not convicted ({cause}): {reason}",
    "link_led": "step {step}: the owner relays messages of {party} to {to}, because one did not arrive",
    "left": "{party} handed over its stages and left",
    "respawned": "{party} was started to replace {in_place_of}",
    "not_let_in": "{party}: {reason}",
    "stages_moved": "step {step}: stages move, because workers joined, left or are slow: {to}",
    "memory_short": "step {step}: stages need more memory than available: {reason}",
    "takeover": "stage {stage} is now served by {by}, before by {from}",
    "round_begun": "round {round} of the federation, from step {step} on",
    "fell_back": "from step {from_step} to the checkpoint of step {to_step}, {steps_lost} steps are lost: {reason}",
    "step_redone": "step {step} is repeated",
    "step_repeated": "step {step} is repeated by all parties: {reason}",
    "batch_skipped": "step {step}: batch {number} is dropped: {reason}",
    "spike_attributed": "step {step}: loss {loss}, norm {gradient_norm} came from the {fault}: {by} ({action})",
    "checkpoint": "after {step} steps",
    "checkpoint_saved": "of step {step} is on disk; manifest {manifest}",
    "checkpoint_failed": "of step {step}: {reason}",
    "checkpoint_not_copied": "of step {step} exists on this disk only: {reason}",
    "journal_failed": "a killed owner would continue from its last checkpoint: {reason}",
    "stopped_early": "after step {step}: {validations_without_improvement} validations on {on} without "
    "improvement, the best was after step {best_step}",
    "config_changed": "from step {step} on the run file has other values: {keys}",
    "older_accepted": "the run continues from step {step}, by request of its user",
    "fault": "{party} about {about}: {reason}",
    "refused": "a message of {party}: {reason}",
    "link_broken": "{party}: {reason}",
    "distrusted": "{party} was replaced after a fault; its work is in doubt unless it was recomputed",
    "state_not_kept": "a conviction cannot return the run to step {step}: {reason}",
    "enclave_appraised": "{party} appraised and accepted the enclave",
    "client_appraised": "the enclave appraised {client}: {evidence} evidence, by policy {policy}",
    "client_evidence_refused": "{client}: its evidence is refused ({reason}), its data is ignored",
    "released": "the enclave released adapters: {num_clients} clients, norm at most {clip_norm}, noise {noise_std}",
    "release_refused": "adapters stay sealed: {detail}",
    "audit_key_revealed": "of commitment {commitment}: with the log, anyone can draw the session's audits again",
    "run_stopped": "{status}",
    "run_completed": "weights {final_weights_digest}",
}


def event_timeline(record: RunRecord) -> Markup:
    """Return the events with the seconds since the first one; a run of equal kinds is folded."""
    start = _event_time(record.events[0]) if record.events else None
    rows: list[list[str]] = []
    # what proves each step is for a verifier; the page says how many it proves
    shown_events = [event for event in record.events if event["kind"] != "step"]
    for group in _fold_events(shown_events)[:_MAX_EVENTS]:
        event = group[-1]
        moment = _event_time(group[0])
        since = f"+{(moment - start).total_seconds():.1f} s" if moment and start else ""
        kind = make_element("span", {"class": f"kind {_LOUD.get(event['kind'], '')}"}, short_text(event["kind"], 40))
        times = f"{len(group)} times, last: " if len(group) > 1 else ""
        rows.append([since, kind, times + describe_event(event["kind"], event["body"])])
    return make_table(["Time", "Event", "Details"], rows, "timeline")


def describe_event(kind: str, body: Mapping[str, Any]) -> str:
    """Return the details of an event in one line; an event without a sentence is listed with its keys."""
    sentence = _SENTENCES.get(kind, "")
    keys = set(re.findall(r"{(\w+)}", sentence))
    if keys and keys <= {key for key, value in body.items() if value is not None}:
        # one pass, so that a value with braces in it is never filled in again
        return short_text(re.sub(r"{(\w+)}", lambda found: short_text(body[found[1]]), sentence), 400)
    if isinstance(body.get("reason"), str):
        return short_text(body["reason"])
    shown = {key: value for key, value in body.items() if key != "stages" and value is not None}
    return short_text(shown)


def _fold_events(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        if groups and groups[-1][0]["kind"] == event["kind"] and event["kind"] not in _ONE_BY_ONE:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _event_time(event: dict[str, Any]) -> datetime | None:
    value = event.get("time")
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo else None
        seconds = parse_number(value)
        return None if seconds is None else datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        return None
