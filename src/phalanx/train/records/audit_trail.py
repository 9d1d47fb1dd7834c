"""The audit trail of a session: the log entries with which others check its audits, and the release of the key."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.errors import AuditLogError, DiskError
from phalanx.pipeline import OWNER, StepRecord
from phalanx.security.audit import AuditLog
from phalanx.train.config import StagedRun
from phalanx.train.records.history import KEY_REVEALED, RunHistory
from phalanx.train.records.log_heads import known_heads
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.samples import DigestOfStep

LOG_FILE = "events.jsonl"
LEAVES_FORMAT = 1
"""Of the leaves beside the log; a session that does not name it has none."""


def open_log(home: RunDirectory) -> AuditLog:
    """Open a run's audit log, which must have every line that anything in its directory knows of.

    Raises:
        AuditLogError: It is broken, or lacks such a line, or another process has it open; nothing is touched then.
    """
    heads = known_heads(home.path, home.owner.public, home.run_id)
    return AuditLog(home.path / LOG_FILE, home.owner, home.run_id, known=heads, kept_at=home.kept_head)


def session_rules(run: StagedRun, home: RunDirectory, workers: Iterable[str]) -> dict[str, Any]:
    """Return the first line of a session beside its commitment, for a reader that draws again."""
    return {
        "leaves_format": LEAVES_FORMAT,
        "guard": run.guard.model_dump(mode="json"),
        "microbatches": run.train.microbatches,
        "steps": run.train.steps,
        "authority": home.owner.authority_pem.decode("ascii"),
        "certificates": {name: home.read_certificate(name) for name in (OWNER, *workers)},
    }


def step_noter(log: AuditLog, samples: DigestOfStep = lambda _: None) -> Callable[[StepRecord], None]:
    """Return a function that takes the record of each step: its root goes into the log, its leaves beside it.

    Args:
        samples: Digest of a step's samples; None where this process draws none, and then the log says nothing of them.
    """

    def note(record: StepRecord) -> None:
        drawn = samples(record.step)
        body = {"step": record.step, "epoch": record.epoch, **({} if drawn is None else {"samples": drawn})}
        log.append_step(body, record.leaves)

    return note


def retire_key(home: RunDirectory, history: RunHistory) -> None:
    """Forget a key that the log has told; a crash may have come between that and its removal."""
    if history.revealed and _key_commitment(home.audit_key()) in history.revealed:
        home.forget_audit_key()


def reveal_key(log: AuditLog, home: RunDirectory, history: RunHistory) -> None:
    """The session is over and no audit is drawn any more: tell the key, so that every draw can be made again.

    A key without a commitment in the log was never drawn with and stays secret. Where the disk is full the log cannot
    grow; its statements about steps stay unproven then.
    """
    if not history.committed - history.revealed:
        return
    key = home.audit_key()
    if _key_commitment(key) not in history.committed - history.revealed:
        return
    with contextlib.suppress(AuditLogError, DiskError):
        log.append_event(KEY_REVEALED, {"commitment": _key_commitment(key), "key": key.hex()})
        log.sync_events()
        home.forget_audit_key()


def _key_commitment(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
