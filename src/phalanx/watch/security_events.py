"""Security events of a run: which events of its log are one, of which class, and how many there were."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from phalanx.report.timeline import describe_event

SecurityClass = Literal[
    "refused_certificate",
    "wrong_token",
    "bad_signature",
    "malformed_message",
    "quota",
    "verdict",
    "suspicion",
    "attestation",
    "policy",
    "log_tampering",
    "unexpected_reader",
]
SECURITY_CLASSES: tuple[SecurityClass, ...] = get_args(SecurityClass)
"""``wrong_token`` and ``unexpected_reader`` are also counted at the doors of ``phalanx watch`` itself."""

CLASS_OF_KIND: dict[str, SecurityClass] = {
    "not_let_in": "refused_certificate",
    "revoked": "refused_certificate",
    "refused": "malformed_message",
    "fault": "malformed_message",
    "client_refused": "quota",
    "client_excluded": "quota",
    "site_excluded": "quota",
    "verdict": "verdict",
    "evicted": "verdict",
    "distrusted": "verdict",
    "rollout_verdict": "verdict",
    "alarm": "suspicion",
    "drift": "suspicion",
    "screen_hit": "suspicion",
    "gradient_doubted": "suspicion",
    "doubts_not_followed": "suspicion",
    "verdict_refused": "suspicion",
    "rollout_dismissal": "suspicion",
    "update_unwitnessed": "suspicion",
    "state_disputed": "suspicion",
    "client_evidence_refused": "attestation",
    "guarantee_weaker": "policy",
    "release_refused": "policy",
    "older_accepted": "policy",
    "config_changed": "policy",
    "budget_spent": "policy",
    "leak_limit": "policy",
    "log_head_ignored": "log_tampering",
    "log_healed": "log_tampering",
}
"""Every kind that is a security event; its class where neither its error nor its reason says it better."""

ORDINARY_KINDS = frozenset(
    {
        *("privacy_terms", "privacy_charged", "run_started", "run_resumed", "adopted", "awaiting", "party_joined"),
        *("left", "lost", "replaced", "respawned", "step", "step_redone", "step_repeated", "stages_moved", "takeover"),
        *("rolled_back", "fell_back", "in_doubt", "noise_committed", "dismissed", "relayed", "link_led", "link_broken"),
        *("memory_short", "guarantees", "checkpoint", "checkpoint_saved", "checkpoint_failed", "checkpoint_not_copied"),
        *("journal_failed", "state_not_kept", "audit_key_revealed", "batch_skipped", "stopped_early", "budget_told"),
        *("round", "round_begun", "round_lost", "site_left_out", "clients_ready", "client_appraised"),
        *(
            "enclave_appraised",
            "released",
            "rollout_writers",
            "run_completed",
            "run_stopped",
            "spike_attributed",
            "leak_price",
        ),
    }
)
"""Every other kind; a test holds that both tables together are the kinds of ``events.jsonl``."""

_CLASS_OF_ERROR: dict[str, SecurityClass] = {
    "SignatureError": "bad_signature",
    "CertificateError": "refused_certificate",
    "PeerRefusedError": "refused_certificate",
}
_WORDS: tuple[tuple[str, SecurityClass], ...] = (
    ("token", "wrong_token"),
    ("invitation", "wrong_token"),
    ("signature", "bad_signature"),
    ("allowance", "quota"),
    ("more than a step", "quota"),
    ("evidence", "attestation"),
)
_MAX_TEXT = 300


@dataclass(frozen=True)
class SecurityEvent:
    """One of them.

    Attributes:
        kind: Kind of the event in the log; empty for an observation of the watcher itself.
        time: Moment in the form of the log.
        subject: The party, client or site; empty where none is named.
    """

    security_class: SecurityClass
    kind: str
    time: str
    subject: str
    text: str


def classify_event(kind: str, body: Mapping[str, Any]) -> SecurityClass | None:
    """Return the class of an event of the log; None of an ordinary one.

    A kind that neither table has is of a later version, or made up: it counts as a suspicion.
    """
    if kind in ORDINARY_KINDS:
        return None
    security_class = CLASS_OF_KIND.get(kind, "suspicion")
    if kind in ("refused", "not_let_in", "fault"):
        error, reason = body.get("error"), str(body.get("reason", "")).lower()
        by_word = next((word_class for word, word_class in _WORDS if word in reason), security_class)
        return _CLASS_OF_ERROR.get(error, by_word) if isinstance(error, str) else by_word
    return security_class


def read_security_event(row: Mapping[str, Any]) -> SecurityEvent | None:
    """Return a line of ``events.jsonl`` as a security event; None where it is none, or no event."""
    kind, body = row.get("kind"), row.get("body")
    if not isinstance(kind, str) or not isinstance(body, dict):
        return None
    security_class = classify_event(kind, body)
    if security_class is None:
        return None
    names = (body.get(key) for key in ("party", "client", "site", "worker", "accuser"))
    subject = next((name for name in names if isinstance(name, str)), "")
    return SecurityEvent(
        security_class, kind[:60], str(row.get("time", ""))[:40], subject[:80], describe_event(kind, body)[:_MAX_TEXT]
    )


class SecurityCounts:
    """Number of security events by class; classes without one are zero."""

    def __init__(self) -> None:
        self._counts: Counter[SecurityClass] = Counter()

    def add_event(self, security_class: SecurityClass) -> None:
        """Count one."""
        self._counts[security_class] += 1

    def read_counts(self) -> dict[SecurityClass, int]:
        """Return the number of each class."""
        return {name: self._counts[name] for name in SECURITY_CLASSES}
