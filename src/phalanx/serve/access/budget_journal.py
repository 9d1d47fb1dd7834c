"""The journal of budgets: reservations and usage, on disk before a request begins.

ACCESS_DIR/budgets.jsonl, 0600, one writer. A line is written before `append` returns, so it outlives the process, and
after `sync` the machine. A last line without its end is the trace of a crash while it was written and is cut off;
any other line that is malformed is an error, since counts behind it would be lost.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from phalanx.closing import Closeable
from phalanx.config import StrictModel
from phalanx.errors import DiskError, InputError
from phalanx.security.crypto import replace_file

KeyId = Annotated[str, Field(pattern=r"^[a-z2-7]{12}\z")]
Tokens = Annotated[int, Field(ge=0, le=2**60)]
Number = Annotated[int, Field(ge=0, le=2**60)]


class Reserved(StrictModel):
    """A request begins, or may use more tokens than an earlier line with its number says.

    Attributes:
        number: Name of the reservation in `Settled`.
        time: Second since 1970.
    """

    kind: Literal["reserved"] = "reserved"
    number: Number
    key: KeyId
    time: Number
    prompt: Tokens
    completion: Tokens


class Settled(StrictModel):
    """A request has ended and used so many tokens."""

    kind: Literal["settled"] = "settled"
    number: Number
    prompt: Tokens
    completion: Tokens


class DayCount(StrictModel):
    """All that a key used in one day, UTC, in the place of the lines that it stands for."""

    kind: Literal["day"] = "day"
    key: KeyId
    day: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}\z")]
    requests: Number
    prompt: Tokens
    completion: Tokens


class MinuteCount(StrictModel):
    """What a key used in one second of the last minute; its day has been counted in `DayCount`."""

    kind: Literal["second"] = "second"
    key: KeyId
    time: Number
    requests: Number
    tokens: Tokens


BudgetEntry = Reserved | Settled | DayCount | MinuteCount
_ENTRY: TypeAdapter[BudgetEntry] = TypeAdapter(Annotated[BudgetEntry, Field(discriminator="kind")])
_MAX_LINE_BYTES = 1024


def read_entries(path: Path) -> Iterator[BudgetEntry]:
    """Yield the complete lines of a journal; none where there is no file."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) < _MAX_LINE_BYTES:
                        return
                    raise InputError(f"{path}: line {number} is over-long; put the journal back as it was")
                try:
                    yield _ENTRY.validate_json(line)
                except ValidationError as exc:
                    raise InputError(f"{path}: line {number} is malformed; put the journal back as it was") from exc
    except FileNotFoundError:
        return
    except OSError as exc:
        raise DiskError(f"{path}: cannot be read ({exc.strerror})") from exc


class BudgetJournal(Closeable):
    """The journal, open for its one writer.

    Raises:
        DiskError: It cannot be opened, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_lines = 0
        self._fd = -1
        self._lock_fd = self._open_fd(path.with_name(path.name + ".lock"))
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock_fd)
            raise DiskError(f"{path}: is open in another server; give each its own access directory") from exc

    def replace_entries(self, entries: Iterable[BudgetEntry]) -> None:
        """Write a new journal in the place of the old one, at once, and go on behind it."""
        lines = [self._encode_entry(entry) for entry in entries]
        replace_file(self._path, b"".join(lines), 0o600)
        self._close_fd()
        self._fd = self._open_fd(self._path)
        self.num_lines = len(lines)

    def append(self, entry: BudgetEntry) -> None:
        """Write one line.

        Raises:
            DiskError: The disk refuses; the journal is then as it was.
        """
        data, written = self._encode_entry(entry), 0
        try:
            start = os.fstat(self._fd).st_size
            try:
                while written < len(data):
                    written += os.write(self._fd, data[written:])
            except OSError:
                os.ftruncate(self._fd, start)
                raise
        except OSError as exc:
            raise DiskError(f"{self._path}: cannot be written ({exc.strerror})") from exc
        self.num_lines += 1

    def sync(self) -> None:
        """Force all lines to disk."""
        try:
            os.fsync(self._fd)
        except OSError as exc:
            raise DiskError(f"{self._path}: cannot be forced to disk ({exc.strerror})") from exc

    def close(self) -> None:
        """Let another server open the journal; closing twice is harmless."""
        self._close_fd()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _encode_entry(self, entry: BudgetEntry) -> bytes:
        return entry.model_dump_json().encode() + b"\n"

    def _open_fd(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise DiskError(f"{path}: cannot be opened ({exc.strerror})") from exc
