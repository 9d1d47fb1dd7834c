"""Files cut into records, records made into documents: the shared part of every source of files.

A file is cut in one pass with one record in memory. What is longer than a record may be, or cannot be unpacked, is
counted and passed over. The raw bytes of all records of a file are the bytes of the file, unpacked.
"""

import functools
import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeGuard

from phalanx.access_gate import note_read
from phalanx.config import canonical_json, printable_text
from phalanx.config.strict import later_key
from phalanx.data.normal_form import is_text
from phalanx.data.sources.files import Location, SourceFile, fingerprint_files, unreadable_error
from phalanx.data.sources.listing import OF_ANOTHER_KIND, list_all
from phalanx.data.sources.packed import Damage, is_packed, open_runs
from phalanx.data.sources.source import BrokenRecord, Document, Origin, SourceSettings
from phalanx.data.sources.spans import FileSpan, MemberBorders
from phalanx.errors import DataError
from phalanx.object_stores import client_errors

_BLOCK_BYTES = 1 << 20
_REASON_CHARACTERS = 300
_FIELD_CHARACTERS = 2000
_TORN = "is next to packed data that cannot be read, and may lack a part; fetch the file again"
_CAME_LATER = ("max_record_bytes", "max_ratio", "linked_roots", "fields", "url", "fetched_at", "extractor")
"""Keys that run files of older versions cannot have."""


class FileSettings(SourceSettings):
    """The keys that all sources of files share.

    Attributes:
        path: A file, or a directory; or the address of either in an object store.
        linked_roots: Directories beside `path` that links below it may lead into; no other link out of it is followed.
        max_record_bytes: A record that is longer, unpacked, is counted as broken and never in memory as a whole.
        max_ratio: A packed file is not unpacked to more than so many times its size, 16 MiB being free.
    """

    path: Location
    linked_roots: tuple[Path, ...] = later_key(())
    max_record_bytes: int = later_key(32 << 20, ge=1)
    max_ratio: int = later_key(200, ge=1)


@dataclass(frozen=True)
class RawRecord:
    """One record of a file, not yet a document."""

    name: str
    content: bytes
    value: Any = None


@dataclass(frozen=True)
class Gap:
    """Bytes of a stream that are no whole record."""

    size: int
    reason: str


@dataclass(frozen=True)
class RecordClaims:
    """What a record says of itself beside its text; claims.

    Attributes:
        digest: The archive's digest of its payload, as ``algorithm:value``.
        digest_holds: Whether it is so; None where nothing is said, or nothing can be checked.
    """

    url: str | None = None
    fetched_at: str | None = None
    digest: str | None = None
    digest_holds: bool | None = None
    fields: Mapping[str, str | int | float] = field(default_factory=dict)


NOTHING = RecordClaims()


def document_of(record: RawRecord, text: str, claims: RecordClaims = NOTHING) -> Document:
    """Return a document with the origin of its record."""
    origin = Origin(
        raw_bytes=len(record.content),
        raw_digest=hashlib.sha256(record.content).hexdigest(),
        url=claims.url,
        fetched_at=claims.fetched_at,
        recorded_digest=claims.digest,
        digest_holds=claims.digest_holds,
    )
    return Document(record.name, text, origin, claims.fields)


class RecordFiles(ABC):
    """A source of files; a kind says how a file is cut, and how a record becomes a document."""

    def __init__(self, config: FileSettings, suffixes: tuple[str, ...]) -> None:
        self._limits = config
        self._options = config.model_dump(mode="json", exclude={"path", "linked_roots"})
        self._files = list_all(config.path, suffixes, config.linked_roots)
        read = [file for file in self._files if file.passed_over is None]
        digest = functools.cache(functools.partial(fingerprint_files, read))
        for place in [config.path, *config.linked_roots, *(file.path for file in read if file.linked_to)]:
            if isinstance(place, Path):
                note_read(f"{config.kind} files", digest, place)

    @property
    def files(self) -> Sequence[SourceFile]:
        """Return all files, sorted by name; skipped ones too."""
        return self._files

    @property
    def passed_over(self) -> list[str]:
        """Names of files that are of this kind by their name, or may be, and are not read."""
        return [file.name for file in self._files if file.passed_over and file.passed_over.reason != OF_ANOTHER_KIND]

    def fingerprint(self) -> str:
        """Digest of names, contents, options and the versions of what takes the text out."""
        options = canonical_json([self._options, *self._library_versions()]).decode()
        before = None if self._options.keys() & set(_CAME_LATER) else self._previous_options()
        files = [file for file in self._files if file.passed_over is None]
        return fingerprint_files(files, options if before is None else before)

    def _previous_options(self) -> str | None:
        """How versions without the later keys named the same options: corpora and runs of theirs go on; None: new."""
        return None

    def documents(self) -> Iterator[Document]:
        """Every document, files by name and records in order; records without text of this kind are passed over."""
        for file in self._files:
            for record in self._cut_file(file, str(file.path)):
                result = record if isinstance(record, BrokenRecord) else self._make_document(record)
                if isinstance(result, Document):
                    yield result
                elif not result.is_unsupported:
                    raise DataError(f"{result.name}: {result.reason}")

    def read_file_records(self, file: SourceFile) -> Iterator[Document | BrokenRecord]:
        """Yield every record of one file, in order; broken ones too."""
        for record in self._cut_file(file, file.name):
            result = record if isinstance(record, BrokenRecord) else self._convert_record(record)
            # whatever library found a fault, its words may quote the bytes that it found
            yield replace(result, reason=_shorten_reason(result.reason)) if isinstance(result, BrokenRecord) else result

    def _convert_record(self, record: RawRecord) -> Document | BrokenRecord:
        try:
            result = self._make_document(record)
            if isinstance(result, Document):
                _check_characters(result)
        except DataError as exc:
            return broken_record(record, str(exc).removeprefix(f"{record.name}: "))
        return result

    def _cut_file(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        if file.passed_over is not None:
            reason = file.passed_over
            yield BrokenRecord(name, reason.size_bytes, reason.reason, is_unsupported=not reason.is_fault)
            return
        try:
            yield from self._cut_records(file, name)
        except client_errors() as exc:
            raise unreadable_error(file.path, exc) from exc

    def _open_runs(self, file: SourceFile) -> Iterator[BinaryIO | Damage]:
        return open_runs(file, self._limits.max_ratio)

    def _whole_record(self, file: SourceFile, name: str) -> RawRecord | BrokenRecord:
        content, size, reason, limit = bytearray(), 0, "", self._limits.max_record_bytes
        for run in self._open_runs(file):
            if isinstance(run, Damage):
                size, reason = size + run.packed_bytes, reason or run.reason
                continue
            while block := run.read(_BLOCK_BYTES):
                size += len(block)
                if size <= limit and not reason:
                    content += block
        if reason:
            return BrokenRecord(name, size, reason)
        return RawRecord(name, bytes(content)) if size <= limit else oversized_record(name, size, limit)

    def _library_versions(self) -> list[str]:
        """Versions of the libraries that decide on the text."""
        return []

    @abstractmethod
    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        """Cut a file; `name` is what its records' names begin with."""

    @abstractmethod
    def _make_document(self, record: RawRecord) -> Document | BrokenRecord:
        """Make a document of a record, or say why there is none, by a `DataError` where it is broken."""


class StreamFiles(RecordFiles):
    """A source of files that are streams of records, each of which can be cut between two records."""

    _UNIT: ClassVar[str]
    """What names call a record."""

    @abstractmethod
    def _cut_stream(self, stream: BinaryIO, limit: int) -> Iterator[bytes | int | Gap]:
        """Cut a stream into records; of one that is longer than `limit` the size alone."""

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        number, limit = 0 if file.span is None else file.span.first, self._limits.max_record_bytes
        last = None if file.span is None else file.span.first + file.span.count
        for run in self._open_runs(file):
            if isinstance(run, Damage):
                yield damage_record(name, run)
                continue
            for piece in self._cut_stream(run, limit):
                if number == last:
                    # nothing at all behind the last delimiter is a part of a file, not of a span
                    return
                number += 1
                place = f"{name}, {self._UNIT} {number}"
                if isinstance(piece, int):
                    yield oversized_record(place, piece, limit)
                elif isinstance(piece, Gap):
                    yield BrokenRecord(place, piece.size, piece.reason)
                else:
                    yield RawRecord(place, piece)

    def cut_spans(self, file: SourceFile, min_bytes: int) -> list[FileSpan]:
        """Cut a file into spans of at least so many bytes on the disk; none where it stays one, as a damaged one does.

        A span begins behind a whole record; of a packed file, where a member ends behind one.
        """
        borders = MemberBorders() if is_packed(file) else None
        spans: list[FileSpan] = []
        begin = first = number = position = 0
        is_whole = False
        for run in open_runs(file, self._limits.max_ratio, borders):
            if isinstance(run, Damage):
                return []
            for record in self._cut_stream(run, self._limits.max_record_bytes):
                place = position if borders is None else borders.packed_at(position)
                if is_whole and place is not None and place - begin >= min_bytes:
                    spans.append(FileSpan(begin, place, first, number - first))
                    begin, first = place, number
                is_whole = isinstance(record, bytes)
                position += (
                    record if isinstance(record, int) else len(record) if isinstance(record, bytes) else record.size
                )
                number += 1
        if not spans:
            return []
        with file.open_bytes() as stream:
            return [*spans, FileSpan(begin, stream.seek(0, 2), first, number - first)]


def broken_record(record: RawRecord, reason: str, *, is_unsupported: bool = False) -> BrokenRecord:
    """Count a record that gives no document."""
    return BrokenRecord(record.name, len(record.content), _shorten_reason(reason), is_unsupported)


def oversized_record(name: str, size: int, limit: int) -> BrokenRecord:
    """Count a record that is larger than the config allows."""
    return BrokenRecord(
        name, size, f"is larger than a record may be, {limit} bytes; if it is right, raise max_record_bytes"
    )


def damage_record(name: str, damage: Damage) -> BrokenRecord:
    """Count what could not be unpacked."""
    return BrokenRecord(name, damage.packed_bytes, damage.reason)


def break_torn_records(
    records: Iterator[RawRecord | BrokenRecord], file_name: str, end: bytes | None
) -> Iterator[RawRecord | BrokenRecord]:
    """Count a record as broken where damage beside it may have taken a part of it, and the rest would pass for all.

    Args:
        file_name: Name of the file, which damage alone goes by.
        end: What a whole record ends with; None where nothing shows its end.
    """
    before: RawRecord | None = None
    is_behind = False
    for record in records:
        is_damage = record.name == file_name
        if before is not None:
            is_whole = not is_damage or (end is not None and strip_delimiter(before.content, end) != before.content)
            yield before if is_whole else broken_record(before, _TORN)
        before = None
        if isinstance(record, BrokenRecord):
            yield record
        elif is_behind:
            yield broken_record(record, _TORN)
        else:
            before = record
        is_behind = is_damage
    if before is not None:
        yield before


def read_bounded_line(stream: BinaryIO, limit: int) -> bytes | int:
    """The next line with its end, empty behind the last one; or the size of a line that is longer than `limit`."""
    row = stream.readline(limit + 1)
    if len(row) <= limit:
        return row
    size = len(row)
    while not row.endswith(b"\n") and (row := stream.readline(_BLOCK_BYTES)):
        size += len(row)
    return size


@functools.cache
def _border_of(delimiter: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes], int]:
    """Patterns of a delimiter, whose line ends may be CR LF, and of one at the end; and its largest size in bytes."""
    border = b"\r?\n".join(map(re.escape, delimiter.split(b"\n")))
    return re.compile(border), re.compile(border + rb"\Z"), len(delimiter) + delimiter.count(b"\n")


def strip_delimiter(content: bytes, delimiter: bytes) -> bytes:
    """Return a part without the delimiter behind it."""
    _, last, width = _border_of(delimiter)
    border = last.search(content, len(content) - width)
    return content if border is None else content[: border.start()]


def split_stream(stream: BinaryIO, delimiter: bytes, limit: int) -> Iterator[bytes | int]:
    """What lies between delimiters, each with the one behind it; of a part longer than `limit` its size alone."""
    pattern, _, width = _border_of(delimiter)
    buffer, passed, start = bytearray(), 0, 0
    while block := stream.read(_BLOCK_BYTES):
        buffer += block
        while border := pattern.search(buffer, start):
            stop = border.end()
            size = passed + stop
            yield bytes(buffer[:stop]) if size <= limit and not passed else size
            del buffer[:stop]
            passed, start = 0, 0
        start = max(0, len(buffer) - width + 1)
        if len(buffer) > limit + width:
            passed += start
            del buffer[:start]
            start = 0
    size = passed + len(buffer)
    yield bytes(buffer) if size <= limit and not passed else size


def recorded_text(value: Any, max_characters: int = 2000) -> str | None:
    """A claim of a record as text; None where it is none, or too long to be one."""
    return value if isinstance(value, str) and 0 < len(value) <= max_characters and is_text(value) else None


def _check_characters(document: Document) -> None:
    if not is_text(document.text):
        raise DataError("holds a lone surrogate, which is not text; repair the document")


def _shorten_reason(reason: str) -> str:
    plain = printable_text(reason, _REASON_CHARACTERS).encode("ascii", "replace").decode()
    return plain if len(reason) <= _REASON_CHARACTERS else f"{plain}..."


class ColumnSettings(FileSettings):
    """The keys of sources with named fields in their records.

    Attributes:
        fields: Further fields that documents keep: numbers, truth values and short texts.
        url: Field with the address that a record was fetched from.
        fetched_at: Field with the time of that.
    """

    fields: tuple[str, ...] = later_key(())
    url: str | None = later_key(None, min_length=1)
    fetched_at: str | None = later_key(None, min_length=1)

    @property
    def beside_columns(self) -> tuple[str, ...]:
        """All names that are looked at beside the text."""
        return (*self.fields, *(name for name in (self.url, self.fetched_at) if name))


def claims_in(record: Mapping[str, Any], config: ColumnSettings) -> RecordClaims:
    """What a record with named fields says of itself."""
    values = {name: record.get(name) for name in config.fields}
    return RecordClaims(
        url=recorded_text(record.get(config.url)) if config.url else None,
        fetched_at=recorded_text(record.get(config.fetched_at), max_characters=64) if config.fetched_at else None,
        fields={name: int(v) if isinstance(v, bool) else v for name, v in values.items() if _is_plain(v)},
    )


def _is_plain(value: Any) -> TypeGuard[str | int | float]:
    if isinstance(value, str):
        return len(value) <= _FIELD_CHARACTERS and is_text(value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)
