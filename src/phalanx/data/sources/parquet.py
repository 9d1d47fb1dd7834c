"""Parquet tables, by row group; a process of its own decodes them."""

import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.packed import is_packed
from phalanx.data.sources.parquet_decoder import ParquetTable, open_table
from phalanx.data.sources.records import (
    ColumnSettings,
    RawRecord,
    RecordFiles,
    claims_in,
    document_of,
    oversized_record,
)
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.data.sources.spans import FileSpan
from phalanx.errors import DataError

_FREE_BYTES = 16 << 20
_MAX_SPANS = 32
"""Of one file: each piece hashes all of it."""


class ParquetConfig(ColumnSettings):
    """Parquet tables, a file or a directory of ``*.parquet``; the text is in the column `column`; needs `data`."""

    kind: Literal["parquet"] = "parquet"
    column: str = Field(default="text", min_length=1)


class ParquetFiles(RecordFiles):
    """One record per row: the bytes of its text as stored.

    Text columns stay behind their dictionary, so that one long text in a million rows is in memory once. What takes
    more memory than any table that was written for reading, or ends its decoder, is broken.
    """

    def __init__(self, config: ParquetConfig) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise DataError("source kind 'parquet' needs pyarrow; install phalanx-train[data]")
        super().__init__(config, (".parquet",))
        self._config = config

    def _library_versions(self) -> list[str]:
        return [f"pyarrow {importlib.metadata.version('pyarrow')}"]

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        if not is_packed(file):
            with file.open_bytes() as stream:
                size = stream.seek(0, 2)
            yield from self._read_tables(str(file.path), name, size, file.span)
            return
        record = self._whole_record(file, name)
        if isinstance(record, BrokenRecord):
            yield record
            return
        with tempfile.NamedTemporaryFile(suffix=".parquet") as unpacked:
            unpacked.write(record.content)
            unpacked.flush()
            yield from self._read_tables(unpacked.name, name, len(record.content))

    def cut_spans(self, file: SourceFile, min_bytes: int) -> list[FileSpan]:
        """Cut a table into runs of row groups, by the sizes and rows that it claims; none where it stays one."""
        if is_packed(file):
            return []
        with file.open_bytes() as stream, open_table(str(file.path), self._config.column) as table:
            size = stream.seek(0, 2)
            try:
                claims = [table.claimed_sizes(group) for group in range(table.num_groups())]
            except DataError:
                # its reader tells of it
                return []
        least = sum(unpacked for unpacked, _ in claims) * max(min_bytes / size, 1 / _MAX_SPANS)
        spans: list[FileSpan] = []
        begin = first = filled = rows = 0
        for group, (unpacked, count) in enumerate(claims, 1):
            filled, rows = filled + unpacked, rows + count
            if filled >= least or group == len(claims):
                spans.append(FileSpan(0, size, first, rows - first, groups=(begin, group)))
                begin, first, filled = group, rows, 0
        return spans if len(spans) > 1 else []

    def _read_tables(
        self, path: str, name: str, size: int, span: FileSpan | None = None
    ) -> Iterator[RawRecord | BrokenRecord]:
        with open_table(path, self._config.column) as table:
            try:
                groups = table.num_groups()
            except DataError as exc:
                yield BrokenRecord(name, size, str(exc))
                return
            if span is None or span.groups is None:
                yield from self._read_groups(table, range(groups), 0, name, size)
            else:
                yield from self._read_groups(table, range(*span.groups), span.first, name, size)

    def _read_groups(
        self, table: ParquetTable, groups: range, first: int, name: str, size: int
    ) -> Iterator[RawRecord | BrokenRecord]:
        before, free = first, max(_FREE_BYTES, self._limits.max_ratio * size)
        beside = [*self._config.beside_columns]
        for group in groups:
            place, claimed = f"{name}, row group {group + 1}", 0
            try:
                unpacked, rows = table.claimed_sizes(group)
                number, before = before, before + rows
                claimed = self._checked_size(unpacked, size)
                for content, claims in table.read_group(group, beside):
                    number += 1
                    free -= max(1, len(content))
                    yield self._checked_record(RawRecord(f"{name}, row {number}", content, claims))
                    if free < 0:
                        yield BrokenRecord(name, 0, f"its rows are more than {self._limits.max_ratio} times its size")
                        return
            except DataError as exc:
                yield BrokenRecord(place, claimed, str(exc))

    def _checked_size(self, unpacked: int, size: int) -> int:
        """The bytes of a row group as the file says; no more than the whole file has."""
        if unpacked > max(_FREE_BYTES, self._limits.max_ratio * size):
            raise DataError(f"unpacks to more than {self._limits.max_ratio} times its size")
        return max(0, min(unpacked, size))

    def _checked_record(self, record: RawRecord) -> RawRecord | BrokenRecord:
        limit = self._limits.max_record_bytes
        if len(record.content) > limit:
            return oversized_record(record.name, len(record.content), limit)
        if record.value is None:
            return BrokenRecord(record.name, 0, "no text in this row", is_unsupported=True)
        return record

    def _make_document(self, record: RawRecord) -> Document:
        try:
            text = record.content.decode()
        except UnicodeDecodeError as exc:
            raise DataError(f"{record.name}: byte {exc.start} of its text is not utf-8") from exc
        return document_of(record, text, claims_in(record.value, self._config))
