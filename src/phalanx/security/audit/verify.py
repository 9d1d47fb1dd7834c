"""Verification of an audit log, offline, with nothing but the signer's public key."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import AuditLogError
from phalanx.security.audit.head import KnownHead, KnownHeads
from phalanx.security.audit.line import LogEntry, LogHead, read_entries
from phalanx.security.crypto import Peer


@dataclass(frozen=True)
class LogSummary:
    """A summary of a whole and honest log.

    Attributes:
        first_time: Time of the first event, RFC 3339; None in an empty log.
    """

    run: str | None
    num_events: int
    kinds: dict[str, int]
    first_time: str | None
    last_time: str | None
    head: LogHead | None


def verify_log(
    path: Path,
    peer: Peer,
    expected: LogHead | None = None,
    run: str | None = None,
    *,
    known: Iterable[KnownHead] = (),
    visit: Callable[[LogEntry], None] = lambda line: None,
) -> LogSummary:
    """Check every line of a log.

    Args:
        expected: End of the log as in ``summary.json``. Without it, a log that was cut off at a line's end looks whole.
        run: The run that it must be of; that of the first line if None.
        known: Heads that it must contain.

    Raises:
        AuditLogError: Names the first broken line, counted from 1, and why: not JSON, another run, a gap in
            the sequence, a broken chain, a bad signature, cut off, shorter or longer than expected.
    """
    kinds: Counter[str] = Counter()
    first: LogEntry | None = None
    last: LogEntry | None = None
    heads = KnownHeads(path, known)
    try:
        with path.open("rb") as file:
            for entry in read_entries(file, path, peer, run):
                kinds[entry.kind] += 1
                first, last = first or entry, entry
                if expected is not None and entry.head.num_events == expected.num_events:
                    _compare_ends(path, entry.head, expected)
                heads.compare_head(entry.head)
                visit(entry)
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror})") from exc
    num_events = last.head.num_events if last else 0
    if expected is not None and num_events != expected.num_events:
        number = min(num_events, expected.num_events) + 1
        raise AuditLogError(
            f"{path}: line {number} is {'missing' if num_events < expected.num_events else 'not expected'}: "
            f"the log has {num_events} events, expected {expected.num_events}"
        )
    heads.check_log_end(num_events)
    return LogSummary(
        run=last.run if last else run,
        num_events=num_events,
        kinds=dict(kinds),
        first_time=first.time if first else None,
        last_time=last.time if last else None,
        head=last.head if last else None,
    )


def _compare_ends(path: Path, head: LogHead, expected: LogHead) -> None:
    if head.digest != expected.digest:
        raise AuditLogError(f"{path}: line {head.num_events} is not the line that the log must end with")
