"""Spans: a file that several processes read is cut between two of its records, and each reads one part of it."""

import io
from collections import deque
from dataclasses import dataclass
from typing import Any, BinaryIO

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSpan:
    """Consecutive records of one file, in bytes as they lie on the disk.

    Attributes:
        end: The byte behind its last one.
        first: Number of records of the file before it, so that each keeps its number.
        digest: SHA-256 of its bytes, in hex; empty where nothing was hashed yet.
        groups: For a table alone, its first row group, and the one behind its last; the bytes are then all of the file.
    """

    begin: int
    end: int
    first: int
    count: int
    digest: str = ""
    groups: tuple[int, int] | None = None

    def open_span(self, stream: BinaryIO) -> BinaryIO:
        """Return a stream of these bytes alone; closing it closes the file's."""
        if self.groups is not None:
            return stream
        return io.BufferedReader(_Window(stream, self.begin, self.end), _BLOCK_BYTES)


class _Window(io.RawIOBase):
    """Some bytes of a stream as a stream of their own."""

    def __init__(self, stream: BinaryIO, begin: int, end: int) -> None:
        stream.seek(begin)
        self._stream, self._remaining = stream, end - begin

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        content = self._stream.read(min(len(buffer), self._remaining))
        buffer[: len(content)] = content
        self._remaining -= len(content)
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()


class MemberBorders:
    """Where members of a packed file end, in unpacked and in packed bytes; forgotten once they are passed."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque([(0, 0)])

    def note_member(self, unpacked: int, packed: int) -> None:
        """Take down the end of one more member."""
        self._ends.append((unpacked, packed))

    def packed_at(self, unpacked: int) -> int | None:
        """Return how many packed bytes a number of unpacked ones came from; None where no member ends there."""
        while self._ends and self._ends[0][0] < unpacked:
            self._ends.popleft()
        return self._ends[0][1] if self._ends and self._ends[0][0] == unpacked else None
