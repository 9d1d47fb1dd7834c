"""One line of the audit log, and the walk along the chain that writer and reader share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.config import canonical_json
from phalanx.errors import AuditLogError, SignatureError
from phalanx.security.crypto import DIGEST_PATTERN, Peer, digest_hex, in_domain, parse_canonical, verify_by_fingerprint

MAX_LINE_BYTES = 4 * 1024 * 1024
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_FIELDS = {
    "sequence": int,
    "time": str,
    "run": str,
    "kind": str,
    "body": dict,
    "previous": str,
    "signature": str,
}


@dataclass(frozen=True)
class LogHead:
    """The end of a log; kept elsewhere, it shows a tail that was cut off.

    Attributes:
        digest: Digest of the last line, or of the run's name where there is none.
    """

    num_events: int
    digest: str


@dataclass(frozen=True)
class LogEntry:
    """One checked event.

    Attributes:
        sequence: Number of the event, from 0.
        time: RFC 3339, UTC.
        size_bytes: Length in bytes, with the newline.
    """

    sequence: int
    time: str
    run: str
    kind: str
    body: dict[str, Any]
    head: LogHead
    size_bytes: int


def first_head(run: str) -> LogHead:
    """Return the head of a log that has no events yet."""
    return LogHead(0, digest_hex(in_domain("log-start/1", run.encode())))


def next_head(head: LogHead, line: bytes) -> LogHead:
    """Return the head after one more line, given without its newline."""
    return LogHead(head.num_events + 1, digest_hex(line))


def signed_part(event: dict[str, Any]) -> bytes:
    """Return the signed part of a line: everything but the signature."""
    return in_domain("log/1", canonical_json({key: event[key] for key in event if key != "signature"}))


def read_entries(file: BinaryIO, path: Path, peer: Peer | None, run: str | None) -> Iterator[LogEntry]:
    """Yield checked lines until the first broken one.

    Args:
        peer: The party that must have signed each line; None: each by the key that its body names.
        run: The run that each line must belong to; that of the first line if None.

    Raises:
        AuditLogError: Names the first broken line, counted from 1, and why.
    """
    head: LogHead | None = None if run is None else first_head(run)
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        try:
            event = _parse_line(raw)
            run = event["run"] if run is None else run
            head = first_head(run) if head is None else head
            check_place(event, run, head)
            signature, statement = bytes.fromhex(event["signature"]), signed_part(event)
            if peer is None:
                verify_by_fingerprint(str(event["body"].get("key")), signature, statement)
            else:
                peer.verify_signature(signature, statement)
        except (ValueError, SignatureError) as exc:
            raise AuditLogError(f"{path}: line {number} is broken: {exc}") from exc
        head = next_head(head, raw[:-1])
        yield LogEntry(
            event["sequence"],
            event["time"],
            run,
            event["kind"],
            event["body"],
            head=head,
            size_bytes=len(raw),
        )


def _parse_line(raw: bytes) -> dict[str, Any]:
    if not raw.endswith(b"\n"):
        raise ValueError("it is cut off or over-long" if len(raw) > MAX_LINE_BYTES else "it is cut off")
    event = parse_canonical(raw[:-1])
    if event.keys() != _FIELDS.keys():
        raise ValueError(f"its keys are {sorted(event)[:10]}, expected {sorted(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(event[name]) is not kind:
            raise ValueError(f"{name} is a {type(event[name]).__name__}, expected {kind.__name__}")
    if DIGEST_PATTERN.fullmatch(event["previous"]) is None or _SIGNATURE.fullmatch(event["signature"]) is None:
        raise ValueError("previous or signature is not lowercase hex of the right length")
    if datetime.fromisoformat(event["time"]).utcoffset() is None:
        raise ValueError("time has no zone")
    return event


def check_place(event: dict[str, Any], run: str, head: LogHead) -> None:
    """Return when an event belongs to a run and follows the line of a head.

    Raises:
        ValueError: It does not; the message says why.
    """
    if event["run"] != run:
        raise ValueError(f"it belongs to run {event['run'][:80]!r}, expected {run!r}")
    if event["sequence"] != head.num_events:
        raise ValueError(f"its sequence number is {event['sequence']}, expected {head.num_events}")
    if event["previous"] != head.digest:
        raise ValueError("the chain is broken: the line before it is not the one it was written after")
