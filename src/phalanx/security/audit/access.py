"""Who reads what: a chained log whose lines are signed by the people who act."""

import fcntl
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from phalanx.config import canonical_json
from phalanx.errors import AuditLogError, DiskError
from phalanx.security.audit.line import LogEntry, LogHead, first_head, next_head, read_entries, signed_part
from phalanx.security.crypto import parse_canonical

_MAX_LOG_BYTES = 2**31


class PersonSigner(Protocol):
    """Whoever signs: a key in a file, in a TPM, or in a token of PKCS#11."""

    @property
    def fingerprint(self) -> str:
        """The public key in hex: 64 characters of Ed25519, or 66 of a compressed point of P-256."""

    def sign_data(self, data: bytes) -> bytes:
        """Return a signature of 64 bytes."""


ROLES_KIND = "roles"
"""Kind of the events that put roles in force."""


class AccessLog:
    """An append-only file of events, each signed by who acted; many people write it in turn.

    Args:
        roles_line: Number of the line with the roles by which the caller judges; 0 before the first.

    Guarantees:
        `append_event` refuses a file whose last line is cut, or that lacks the line of a head that the caller
        remembers, or the last line that this object wrote, from which on it reads the file; or in which other roles
        follow those of the caller. It checks the signature of no line; `read_access_log` checks each.
    """

    def __init__(self, path: Path, scope: str, roles_line: int = 0) -> None:
        self._path, self._scope, self._roles_line = path, scope, roles_line
        self._last, self._last_offset = first_head(scope), 0

    def append_event(
        self, signer: PersonSigner, kind: str, body: dict[str, Any], known: LogHead | None = None
    ) -> LogHead:
        """Write one event and force it to disk; return the head after it."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o664)
        except OSError as exc:
            raise DiskError(f"{self._path}: cannot be opened ({exc.strerror})") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            head = self._find_head(fd, known)
            line = self._sign_line(signer, kind, body, head)
            offset = os.fstat(fd).st_size
            _write_line(fd, line + b"\n", offset)
        except OSError as exc:
            raise DiskError(f"{self._path}: cannot be written ({exc.strerror})") from exc
        finally:
            os.close(fd)
        self._last, self._last_offset = next_head(head, line), offset
        return self._last

    def _find_head(self, fd: int, known: LogHead | None) -> LogHead:
        # lines before the last one of this object were there when it was written, and a head of then is in them
        is_later = known is None or known.num_events >= self._last.num_events
        first, offset = (max(self._last.num_events - 1, 0), self._last_offset) if is_later else (0, 0)
        lines = self._read_lines(fd, offset)
        head, num_lines = first_head(self._scope), first + len(lines)
        for seen in (self._last, known):
            if seen is None or not seen.num_events:
                continue
            if seen.num_events > num_lines:
                raise AuditLogError(f"{self._path}: lacks lines: this person has seen {seen.num_events}; put it back")
            if next_head(head, lines[seen.num_events - first - 1]).digest != seen.digest:
                raise AuditLogError(f"{self._path}: line {seen.num_events} is another than this person has seen")
        for number, line in enumerate(lines, first + 1):
            if number > self._roles_line and is_of_roles(line):
                raise AuditLogError(f"{self._path}: line {number}: roles were changed since; begin again")
        return LogHead(num_lines, next_head(head, lines[-1]).digest) if lines else head

    def _read_lines(self, fd: int, offset: int) -> list[bytes]:
        if os.fstat(fd).st_size > _MAX_LOG_BYTES:
            raise AuditLogError(f"{self._path}: is too large; move the project's log to a new project")
        os.lseek(fd, offset, os.SEEK_SET)
        parts: list[bytes] = []
        while part := os.read(fd, 2**20):
            parts.append(part)
        lines = b"".join(parts).split(b"\n")
        if lines.pop():
            raise AuditLogError(f"{self._path}: its last line is cut off; put the whole log back")
        return lines

    def _sign_line(self, signer: PersonSigner, kind: str, body: dict[str, Any], head: LogHead) -> bytes:
        event = {
            "sequence": head.num_events,
            "time": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "run": self._scope,
            "kind": kind,
            "body": {**body, "key": signer.fingerprint},
            "previous": head.digest,
        }
        event["signature"] = signer.sign_data(signed_part(event)).hex()
        line = canonical_json(event)
        parse_canonical(line)
        return line


def is_of_roles(line: bytes) -> bool:
    """Whether a line puts roles in force; its signature is not checked."""
    if b'"kind":"roles"' not in line:
        return False
    try:
        return parse_canonical(line.rstrip(b"\n")).get("kind") == ROLES_KIND
    except ValueError:
        return True


def _write_line(fd: int, line: bytes, offset: int) -> None:
    """Write a whole line, or none: half a line would stop everybody who is to write the next one."""
    try:
        written = 0
        while written < len(line):
            written += os.write(fd, line[written:])
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, offset)
        raise


def read_access_log(path: Path, scope: str, known: LogHead | None = None) -> Iterator[LogEntry]:
    """Yield the events of an access log, each checked against the key that it names, in the chain.

    Raises:
        AuditLogError: Names the first broken line, or says that the end is missing.
    """
    num_events = 0
    try:
        with path.open("rb") as file:
            for entry in read_entries(file, path, None, scope):
                num_events = entry.head.num_events
                if known is not None and num_events == known.num_events and entry.head.digest != known.digest:
                    raise AuditLogError(f"{path}: line {num_events} is another than the known one")
                yield entry
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror})") from exc
    if known is not None and num_events < known.num_events:
        raise AuditLogError(f"{path}: ends after {num_events} lines, and {known.num_events} are known; put it back")
