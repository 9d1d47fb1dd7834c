"""Files of a run as they grow: read from where the last look ended, and never written, locked or asked for."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.telemetry.run_files import open_run_file, parse_row

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
        self._inode, self._offset, self._rest, self._is_too_long = 0, 0, b"", False
        self.num_bad = 0

    def read_new(self, max_bytes: int = _PIECE_BYTES) -> tuple[list[Row], bool]:
        """Return the rows since the last call, and whether the file began anew (a resumed run replaces it).

        Args:
            max_bytes: Bytes that are read at once; the rest waits for the next call.
        """
        try:
            opened = open_run_file(self._path)
        except OSError:
            return [], False
        with opened as file:
            status = os.fstat(file.fileno())
            is_new = self._inode not in (0, status.st_ino) or status.st_size < self._offset
            if is_new:
                self._offset, self._rest, self._is_too_long, self.num_bad = 0, b"", False, 0
            self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read(max_bytes)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._is_too_long and lines:
            # the end of a line is no line
            lines, self._is_too_long = lines[1:], False
            self.num_bad += 1
        if self._is_too_long or len(self._rest) > _MAX_LINE_BYTES:
            self._rest, self._is_too_long = b"", True
        return list(self._parse_rows(lines)), is_new

    def _parse_rows(self, lines: list[bytes]) -> Iterator[Row]:
        for text in lines:
            row = parse_row(text)
            if row is None:
                self.num_bad += bool(text.strip())
            else:
                yield row


def read_object(path: Path) -> Row | None:
    """Return the JSON object in a file; None where there is none."""
    try:
        with open_run_file(path) as file:
            return parse_row(file.read(_MAX_OBJECT_BYTES))
    except OSError:
        return None


def read_tail(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, at most 32 KiB of it; none where it cannot be read."""
    try:
        with open_run_file(path) as file:
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
