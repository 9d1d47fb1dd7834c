"""Records on disk: blocks of zstd, each read by itself, and an index at the end that finds a record by its number."""

import bisect
import importlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from phalanx.data.sources import Document, Origin
from phalanx.errors import DataError

_BLOCK_BYTES = 1 << 18
_TAIL = struct.Struct("<QQI4s")
"""Blocks, records, a checksum of the index before it, and the mark at the end of a complete file."""
_END = b"PHXR"
_ENTRY = struct.Struct("<QQ")
_LENGTH = struct.Struct("<I")
LONGEST_RECORD = (1 << 32) - 1


def import_zstd() -> Any:
    """Return the library that packs blocks, which is an extra."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as exc:
        raise DataError("a data build needs zstandard; install phalanx-train[data]").with_facts(
            do="install phalanx-train[data]"
        ) from exc


class RecordWriter:
    """Appends records to a new file; the file is whole once `close` has returned."""

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = path.open("wb")
        self._pack = import_zstd().ZstdCompressor(level=1, write_checksum=True)
        self._block = bytearray()
        self._index = bytearray()
        self._first = self._count = 0

    def append_record(self, record: bytes) -> None:
        """Add one record."""
        if len(record) > LONGEST_RECORD:
            raise DataError(f"a record of {len(record)} bytes is too long; the limit is {LONGEST_RECORD}")
        self._block += _LENGTH.pack(len(record)) + record
        self._count += 1
        if len(self._block) >= _BLOCK_BYTES:
            self._flush_block()

    def close(self) -> None:
        """Write the remaining records, and the index."""
        self._flush_block()
        tail = _TAIL.pack(len(self._index) // _ENTRY.size, self._count, zlib.crc32(self._index), _END)
        self._stream.write(bytes(self._index) + tail)
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._stream.close()

    def _flush_block(self) -> None:
        if self._block:
            self._index += _ENTRY.pack(self._stream.tell(), self._first)
            self._stream.write(self._pack.compress(bytes(self._block)))
            self._block.clear()
            self._first = self._count


class RecordFile:
    """Reads the file of a `RecordWriter`; one block is in memory at a time."""

    def __init__(self, path: Path) -> None:
        """Read the index."""
        self._path = path
        self._unpack = import_zstd().ZstdDecompressor()
        self._count: int
        self._index_start: int
        size = path.stat().st_size
        with path.open("rb") as stream:
            stream.seek(max(0, size - _TAIL.size))
            tail = stream.read()
            if len(tail) < _TAIL.size or not tail.endswith(_END):
                raise self._damage_error()
            blocks, self._count, checksum, _ = _TAIL.unpack(tail)
            self._index_start = size - _TAIL.size - blocks * _ENTRY.size
            stream.seek(max(0, self._index_start))
            index = stream.read(blocks * _ENTRY.size) if self._index_start >= 0 else b""
        if self._index_start < 0 or zlib.crc32(index) != checksum:
            raise self._damage_error()
        self._index: list[tuple[int, int]] = list(_ENTRY.iter_unpack(index))
        self._firsts = [first for _, first in self._index]
        self._block: tuple[int, list[bytes]] = (-1, [])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        for number in range(len(self._index)):
            yield from self._read_block(number)

    def iterate_from(self, number: int) -> Iterator[bytes]:
        """Yield the records from one on."""
        block = max(0, bisect.bisect_right(self._firsts, number) - 1)
        for later in range(block, len(self._index)):
            skipped = number - self._firsts[later] if later == block else 0
            yield from self._read_block(later)[skipped:]

    def __getitem__(self, number: int) -> bytes:
        block = bisect.bisect_right(self._firsts, number) - 1
        if self._block[0] != block:
            self._block = (block, self._read_block(block))
        return self._block[1][number - self._firsts[block]]

    def _read_block(self, block: int) -> list[bytes]:
        start = self._index[block][0]
        stop = self._index[block + 1][0] if block + 1 < len(self._index) else self._index_start
        with self._path.open("rb") as stream:
            stream.seek(start)
            packed = stream.read(stop - start)
        try:
            content = self._unpack.decompress(packed)
        except import_zstd().ZstdError as exc:
            raise self._damage_error() from exc
        records, position = [], 0
        while position < len(content):
            (length,) = _LENGTH.unpack_from(content, position)
            position += _LENGTH.size
            records.append(content[position : position + length])
            position += length
        return records

    def _damage_error(self) -> DataError:
        return DataError(f"{self._path}: was truncated or altered; delete {self._path.parent} to make it again")


def encode_document(document: Document) -> bytes:
    """Return a document as one record."""
    origin = None if document.origin is None else asdict(document.origin)
    head = [document.name, origin, dict(document.fields)]
    return json.dumps([*head, document.text], ensure_ascii=False, separators=(",", ":")).encode()


def decode_document(record: bytes) -> Document:
    """Return the document of a record."""
    name, origin, fields, text = json.loads(record)
    return Document(name, text, None if origin is None else Origin(**origin), fields)


def encode_json_line(value: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
