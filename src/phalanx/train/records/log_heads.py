"""The heads of the audit log that a run directory holds, so that none of the log's lines can be taken away."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.checkpoint import list_checkpoints
from phalanx.checkpoint.manifest import MANIFEST_FILE, verify_manifest
from phalanx.errors import AuditLogError, CheckpointError
from phalanx.security.audit import KnownHead, LogHead, read_head
from phalanx.security.crypto import Peer, boot_name
from phalanx.train.records.journal import read_entry
from phalanx.train.records.run_directory import HEAD_FILE

SUMMARY_FILE = "summary.json"


def known_heads(run_dir: Path, owner: Peer, run: str | None = None) -> list[KnownHead]:
    """Collect the heads that the owner has signed in a run directory.

    Args:
        run: The run that they must be of; None accepts any.

    A manifest, a journal or a summary that cannot be read yields no head here; a run that goes on from it refuses it.
    """
    heads = [*_checkpoint_heads(run_dir / "checkpoints", owner), *_journal_heads(run_dir / "journal", owner)]
    head_file = run_dir / HEAD_FILE
    if head_file.exists():
        heads.append(KnownHead(read_head(_read_json(head_file), owner, run, str(head_file)), str(HEAD_FILE)))
    summary = head_in_summary(run_dir, owner, run)
    return heads if summary is None else [*heads, KnownHead(summary, SUMMARY_FILE)]


def head_in_summary(run_dir: Path, owner: Peer, run: str | None = None) -> LogHead | None:
    """Return the signed head in ``summary.json``; None where there is none that holds."""
    path = run_dir / SUMMARY_FILE
    try:
        return read_head(_read_json(path)["audit_log_head_signed"], owner, run, str(path))
    except (AuditLogError, KeyError, TypeError):
        return None


def _checkpoint_heads(directory: Path, owner: Peer) -> Iterator[KnownHead]:
    for step, path in sorted(_list_checkpoints(directory).items()):
        manifest_path = path / MANIFEST_FILE
        try:
            manifest = verify_manifest(manifest_path.read_bytes(), owner, manifest_path)
        except (OSError, CheckpointError):
            continue
        if manifest.audit_log is not None:
            yield KnownHead(manifest.audit_log.log_head, f"the checkpoint of step {step}")


def _journal_heads(directory: Path, owner: Peer) -> Iterator[KnownHead]:
    try:
        entry = read_entry(directory, owner)
    except CheckpointError:
        return
    head = None if entry is None else entry.log_head
    # after the machine itself went down, the log may honestly lack what was not forced to disk
    if entry is not None and head is not None and entry.boot is not None and entry.boot == boot_name():
        yield KnownHead(head, "the journal")


def _list_checkpoints(directory: Path) -> dict[int, Path]:
    try:
        return list_checkpoints(directory)
    except OSError:
        return {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise AuditLogError(f"{path}: cannot be read, so a truncated log could not be detected") from exc
