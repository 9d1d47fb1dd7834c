"""Files of a run as they grow: read from where the last look ended, and never written, locked or asked for."""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_PIECE_BYTES = 8 << 20
_MAX_LINE_BYTES = 16 << 20
_MAX_OBJECT_BYTES = 4 << 20
_TAIL_BYTES = 32 << 10
_LOCK_LINE = re.compile(r"\d+: FLOCK\s+ADVISORY\s+WRITE (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")


class GrowingRows:
    """The JSON objects of a file with one a line, as they are added.

    Attributes:
        num_bad: Lines that are no object; they are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._rest = 0, 0, b""
        self.num_bad = 0

    def read_new(self, max_bytes: int = _PIECE_BYTES) -> tuple[list[Row], bool]:
        """Return the rows since the last call, and whether the file began anew (a resumed run replaces it).

        Args:
            max_bytes: Bytes that are read at once; the rest waits for the next call.
        """
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return [], False
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return [], False
            is_new = self._inode not in (0, status.st_ino) or status.st_size < self._offset
            if is_new:
                self._offset, self._rest, self.num_bad = 0, b"", 0
            self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read(max_bytes)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest = b""
        return list(self._parse_rows(lines)), is_new

    def _parse_rows(self, lines: list[bytes]) -> Iterator[Row]:
        for text in lines:
            row = parse_object(text)
            if row is None:
                self.num_bad += bool(text.strip())
            else:
                yield row


def parse_object(text: bytes) -> Row | None:
    """Return a JSON object; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> Row | None:
    """Return the JSON object in a file; None where there is none."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return parse_object(file.read(_MAX_OBJECT_BYTES))
    except OSError:
        return None


def read_tail(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, at most 32 KiB of it; none where it cannot be read."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[-num_lines:]


def find_owner(log: Path, locks: Path = Path("/proc/locks")) -> int | None:
    """Return the id of the process that holds the lock of a run's log; None where nobody does or the kernel hides it.

    The list of locks is read: to try the lock would refuse a run that starts at that moment.
    """
    try:
        status, text = log.stat(), locks.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    for match in map(_LOCK_LINE.match, text.splitlines()):
        if match and (int(match[2], 16), int(match[3], 16)) == device and int(match[4]) == status.st_ino:
            return int(match[1])
    return None
