"""Writing the audit log."""

import fcntl
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.config import canonical_json
from phalanx.errors import AuditLogError, DiskError
from phalanx.interrupts import hold_interrupts
from phalanx.security.audit.head import KnownHead, KnownHeads, sign_head, write_signed_head
from phalanx.security.audit.leaves import LEAVES_FILE, STEP, LeafBatch, LeafFile
from phalanx.security.audit.line import MAX_LINE_BYTES, LogHead, first_head, next_head, read_entries, signed_part
from phalanx.security.audit.public_head import PublicEntries
from phalanx.security.crypto import Identity, digest_hex, parse_canonical


class AuditLog(Closeable):
    """An append-only file of signed, chained events: one canonical JSON object a line.

    Reopening a log checks all of it. A last line without its newline is the trace of a crash while writing:
    it is removed, and a `log_healed` event says so, unless a known head shows that the line was whole. Anything else
    that is wrong is an error.

    Args:
        kept_at: A file that gets the signed head each time the log is forced to disk; None for no such file.

    Raises:
        AuditLogError: A line is broken, one that is known is missing or another one, the log belongs to another run
            or signer, or another process has it open. The file is then as it was.
        DiskError: It cannot be read or written; the file is then as it was.

    Guarantees:
        Events survive the end of the process once `append_event` returns, and a crash of the machine once
        `sync_events` does.
        Safe to use from several threads; Ctrl-C and SIGTERM wait for the end of a line (see `hold_interrupts`).
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        run: str,
        *,
        known: Iterable[KnownHead] = (),
        kept_at: Path | None = None,
    ) -> None:
        self._path, self._identity, self._run, self._head_path = path, identity, run, kept_at
        self._lock, self._sync_lock = threading.Lock(), threading.Lock()
        self._head = first_head(run)
        self._digests: list[bytes] = []
        self.public_entries = PublicEntries(identity, run)
        self._leaves: LeafFile | None = None
        self._leaves_end = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise DiskError(f"{path}: cannot be opened ({exc.strerror})") from exc
        try:
            self._lock_file()
            self._resume_log(KnownHeads(path, known))
        except (AuditLogError, DiskError):
            self._release_file()
            raise

    @property
    def current_head(self) -> LogHead:
        """Present end of the log; `verify_log` compares a log with it."""
        return self._head

    @property
    def size_bytes(self) -> int:
        """Bytes of all lines; 0 of a closed log."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    @property
    def signed_head(self) -> dict[str, Any]:
        """The same as JSON data that proves itself, see `read_head`."""
        return sign_head(self._identity, self._run, self._head)

    def contains_head(self, head: LogHead) -> bool:
        """Whether the log has ended like this once."""
        if head.num_events == 0:
            return head == first_head(self._run)
        is_inside = 0 < head.num_events <= len(self._digests)
        return is_inside and self._digests[head.num_events - 1].hex() == head.digest

    def append_event(self, kind: str, body: dict[str, Any]) -> None:
        """Write one event.

        Args:
            body: JSON data about it; never a key, prompt or tensor value.

        Raises:
            AuditLogError: The body is no JSON data or too large.
            DiskError: The line cannot be written. After either the log is as it was before.
        """
        # a line that is written but not counted would be followed by another one of its number
        with self._lock, hold_interrupts():
            entry = self._sign_entry(kind, body)
            self._write_bytes(entry + b"\n")
            self._advance_head(kind, next_head(self._head, entry))

    def append_step(self, body: dict[str, Any], leaves: Sequence[bytes]) -> None:
        """Write the leaves of one step beside the log, and the event `step` with their Merkle root.

        Args:
            body: Details of the step; the keys of `LeafBatch` are added.
            leaves: Canonical JSON of each leaf, without newlines.
        """
        if self._leaves is None:
            self._leaves = LeafFile(self._path.with_name(LEAVES_FILE), self._leaves_end)
        batch = self._leaves.append_leaves(leaves)
        self.append_event(STEP, {**body, **asdict(batch)})

    def sync_events(self) -> LogHead:
        """Force all events to disk, as a checkpoint that refers to them needs.

        Returns:
            Where the log ends on the disk, at least: others may keep it, for it outlives the machine.
        """
        with self._sync_lock:
            head, public = self._head, len(self.public_entries)
            # what a line names must not be lost before the line is
            if self._leaves is not None:
                self._leaves.sync_leaves()
            try:
                os.fsync(self._fd)
                if self._head_path is not None:
                    write_signed_head(self._head_path, sign_head(self._identity, self._run, head))
            except OSError as exc:
                raise DiskError(f"{self._path}: cannot be forced to disk ({exc.strerror})") from exc
            self.public_entries.note_forced(public)
            return head

    def close(self) -> None:
        """Force all events to disk and let others open the log; closing twice is harmless."""
        with self._lock:
            if self._leaves is not None:
                self._leaves.sync_leaves()
            if self._fd >= 0:
                os.fsync(self._fd)
            self._release_file()

    def _release_file(self) -> None:
        if self._leaves is not None:
            self._leaves.close()
            self._leaves = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise AuditLogError(f"{self._path}: is open elsewhere; a log has one writer") from exc

    def _advance_head(self, kind: str, head: LogHead) -> None:
        self._head = head
        self.public_entries.count_entry(kind, head.digest)
        self._digests.append(bytes.fromhex(head.digest))

    def _resume_log(self, known: KnownHeads) -> None:
        try:
            size_bytes = os.fstat(self._fd).st_size
            tail = os.pread(self._fd, MAX_LINE_BYTES, max(0, size_bytes - MAX_LINE_BYTES))
            partial = tail[tail.rfind(b"\n") + 1 :]
            self._check_lines(size_bytes - len(partial), known)
            if self._leaves_end:
                self._leaves = LeafFile(self._path.with_name(LEAVES_FILE), self._leaves_end)
            if partial:
                os.ftruncate(self._fd, size_bytes - len(partial))
            if self._leaves is not None:
                self._leaves.sync_leaves()
            # others may be told what is here already
            os.fsync(self._fd)
            self.public_entries.note_forced(len(self.public_entries))
        except OSError as exc:
            raise DiskError(f"{self._path}: cannot be read again ({exc.strerror})") from exc
        if partial:
            self.append_event("log_healed", {"removed_bytes": len(partial), "removed_digest": digest_hex(partial)})
            self.sync_events()

    def _check_lines(self, complete_bytes: int, known: KnownHeads) -> None:
        with self._path.open("rb") as file:
            lines = read_entries(file, self._path, self._identity.public, self._run)
            checked_bytes = 0
            while checked_bytes < complete_bytes:
                entry = next(lines, None)
                if entry is None:
                    raise AuditLogError(f"{self._path}: became shorter while it was read")
                known.compare_head(entry.head)
                self._advance_head(entry.kind, entry.head)
                if entry.kind == STEP:
                    batch = LeafBatch.from_log_entry(entry)
                    self._leaves_end = batch.offset + batch.size_bytes
                checked_bytes += entry.size_bytes
        known.check_log_end(self._head.num_events)

    def _sign_entry(self, kind: str, body: dict[str, Any]) -> bytes:
        event = {
            "sequence": self._head.num_events,
            "time": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "run": self._run,
            "kind": kind,
            "body": body,
            "previous": self._head.digest,
        }
        try:
            event["signature"] = self._identity.sign_data(signed_part(event)).hex()
            entry = canonical_json(event)
            # what a reader would refuse must not be written: numeric keys, 65-bit integers, deep nesting
            parse_canonical(entry)
        except (TypeError, ValueError, RecursionError) as exc:
            raise AuditLogError(f"{self._path}: the body of {kind!r} is no JSON data: {exc}") from exc
        if len(entry) >= MAX_LINE_BYTES:
            raise AuditLogError(f"{self._path}: {kind!r} takes {len(entry)} bytes, at most {MAX_LINE_BYTES} fit a line")
        return entry

    def _write_bytes(self, data: bytes) -> None:
        if self._fd < 0:
            raise AuditLogError(f"{self._path}: is closed")
        start = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as exc:
            # half a line would be followed by the next one and look like an attack
            os.ftruncate(self._fd, start)
            raise DiskError(f"{self._path}: cannot be written ({exc.strerror})") from exc
