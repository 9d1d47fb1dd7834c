"""The history of a run, from its signed audit log; a resumed run believes nothing else about parties."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint import CertifiedCheckpoints
from phalanx.errors import AuditLogError
from phalanx.security.audit import LogHead
from phalanx.security.audit.line import read_entries
from phalanx.security.crypto import Peer, certified_name
from phalanx.security.privacy.ledger import PastCharges


@dataclass
class RunHistory:
    """Events of a verified log that later sessions depend on.

    Attributes:
        decisions: Decisions of the guard as (kind, body), oldest first.
        convicted: Parties that were found guilty; they never come back.
        convicted_writers: The same of workers that write texts.
        revoked: Parties with a certificate that the owner has taken back; they never come back.
        final_weights_digest: Digest at the run's end; None while it has not ended.
        released_digest: Digest of the adapters that an enclave has let out; None where it let out none.
        head: End of the log; None when it is empty.
        opened: Whether a session has named its training data; before that, it may have ended during preparations.
        adopted: Whether the run began where another one was.
        undone_at: Number of events when steps were undone for the last time; 0 when none were.
        configs: Digests of the run files of all sessions: a resumed one may have changed some keys.
        policies: Digests of the policies of all sessions; a run under a policy has one.
        committed: Digests of audit keys that sessions have drawn with.
        revealed: Those of them with a key that the log tells; no session must draw with them again.
    """

    decisions: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    convicted: set[str] = field(default_factory=set)
    convicted_writers: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    final_weights_digest: str | None = None
    released_digest: str | None = None
    head: LogHead | None = None
    opened: bool = False
    adopted: bool = False
    certified: CertifiedCheckpoints = field(default_factory=CertifiedCheckpoints)
    undone_at: int = 0
    configs: set[str] = field(default_factory=set)
    policies: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    revealed: set[str] = field(default_factory=set)
    charges: PastCharges = field(default_factory=PastCharges)

    def matches_summary(self, summary: dict[str, Any]) -> bool:
        """Whether a summary speaks of a run that has ended, with the end and the log that are known here."""
        head = None if self.head is None else {"num_events": self.head.num_events, "digest": self.head.digest}
        return (
            summary.get("status") == "completed"
            and self.final_weights_digest is not None
            and summary.get("final_weights_digest") == self.final_weights_digest
            and summary.get("audit_log_head") == head
        )


KEY_REVEALED = "audit_key_revealed"
"""Kind of the event that ends the secrecy of an audit key."""

ROUND_BEGUN = "round_begun"
"""Kind of the event in the log of a site's pipeline that says with which step a federated round begins."""

CONFIG_CHANGED = "config_changed"
"""Kind of the event that a resumed run writes when its run file has other values than before."""

FELL_BACK = "fell_back"
"""Kind of the event that says that applied steps are lost: there is no state of them to go on from."""

UNDOINGS = ("rolled_back", FELL_BACK, "older_accepted")
_DECISIONS = (
    *("verdict", "verdict_refused", "distrusted", "evicted", "lost", "replaced", "takeover"),
    *(FELL_BACK, "batch_skipped"),
    "drift",
    "guarantees",
)


def read_history(path: Path, peer: Peer, run: str) -> RunHistory:
    """Read a log, checking every line.

    Args:
        path: The log; one that is not there is empty.

    Guarantees:
        A party counts as convicted as soon as its verdict is in the log, whatever checkpoint the run goes
        on from: a crash between verdict and checkpoint lets no party back in.
    """
    history = RunHistory()
    if not path.exists():
        return history
    try:
        with path.open("rb") as file:
            for entry in read_entries(file, path, peer, run):
                _note_line(history, entry.kind, entry.body)
                history.head = entry.head
                if entry.kind in UNDOINGS:
                    history.undone_at = entry.head.num_events
    except (OSError, KeyError) as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc})") from exc
    return history


def _note_line(history: RunHistory, kind: str, body: dict[str, Any]) -> None:
    history.certified.follow_event(kind, body)
    history.charges.read_entry(kind, body)
    history.adopted = history.adopted or kind == "adopted"
    history.opened = history.opened or kind in ("run_started", "run_resumed")
    if kind in _DECISIONS:
        history.decisions.append((kind, body))
    if kind in ("evicted", "verdict"):
        history.convicted.add(certified_name(body["party"]))
    if kind == "rollout_verdict":
        history.convicted_writers.add(body["party"])
    if kind in ("run_started", "run_resumed") and isinstance(body.get("config_digest"), str):
        history.configs.add(body["config_digest"])
    if kind in ("run_started", "run_resumed") and "policy" in body:
        history.policies.add(str(body["policy"]))
    if kind == CONFIG_CHANGED:
        history.configs |= {str(body["from"]), str(body["to"])}
    if kind == "released":
        history.released_digest = body.get("weights_digest")
    if kind == "revoked":
        history.revoked.add(certified_name(body["party"]))
    if kind in ("run_started", "run_resumed") and body.get("audit_key_commitment") is not None:
        history.committed.add(body["audit_key_commitment"])
    if kind == KEY_REVEALED:
        history.revealed.add(body["commitment"])
    # a session after the end, which found a summary missing, ends the run once more
    if kind in ("run_resumed", "run_completed"):
        history.final_weights_digest = body.get("final_weights_digest")
