"""Parquet tables, by row group."""

import contextlib
import importlib
import importlib.metadata
import io
from collections.abc import Iterator
from datetime import date
from typing import Any, BinaryIO, Literal

from pydantic import Field

from phalanx.data.sources.columns import ColumnSettings, said_in
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.packed import is_packed
from phalanx.data.sources.records import RawRecord, RecordFiles, document_of, too_long
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_ROWS = 64
_FREE_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20


class ParquetConfig(ColumnSettings):
    """Parquet tables, a file or a directory of ``*.parquet``; the text is in the column `column`; needs `data`."""

    kind: Literal["parquet"] = "parquet"
    column: str = Field(default="text", min_length=1)


class ParquetFiles(RecordFiles):
    """One record per row: the bytes of its text as stored.

    Text columns stay behind their dictionary, so that one long text in a million rows is in memory once.
    """

    def __init__(self, config: ParquetConfig) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            self._parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as exc:
            raise DataError("source kind 'parquet' needs pyarrow; install phalanx-train[data]") from exc
        super().__init__(config, (".parquet",))
        self._config = config

    def _versions(self) -> list[str]:
        return [f"pyarrow {importlib.metadata.version('pyarrow')}"]

    def _records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        with contextlib.ExitStack() as stack:
            if is_packed(file):
                whole = self._whole(file, name)
                if isinstance(whole, BrokenRecord):
                    yield whole
                    return
                stream: BinaryIO = io.BytesIO(whole.content)
            else:
                stream = stack.enter_context(file.open())
            size = stream.seek(0, io.SEEK_END)
            try:
                table = self._table(stream)
            except DataError as exc:
                yield BrokenRecord(name, size, str(exc))
                return
            yield from self._groups(table, name, size)

    def _groups(self, table: Any, name: str, size: int) -> Iterator[RawRecord | BrokenRecord]:
        number, free = 0, max(_FREE_BYTES, self._limits.max_ratio * size)
        for group in range(table.num_row_groups):
            where, claimed = f"{name}, row group {group + 1}", 0
            try:
                claimed = self._claimed_size(table, group, size)
                for row in self._rows(table, group):
                    number += 1
                    free -= max(1, len(row.content))
                    yield self._checked(RawRecord(f"{name}, row {number}", row.content, row.value))
                    if free < 0:
                        yield BrokenRecord(name, 0, f"its rows are more than {self._limits.max_ratio} times its size")
                        return
            except DataError as exc:
                yield BrokenRecord(where, claimed, str(exc))

    def _claimed_size(self, table: Any, group: int, size: int) -> int:
        """The bytes of a row group as the file says; no more than the whole file has.

        Sizes of single columns are not asked for: pyarrow aborts the process where these are malformed.

        Raises:
            DataError: The file says that it unpacks to more than the config allows.
        """
        try:
            unpacked = int(table.metadata.row_group(group).total_byte_size)
        except Exception as exc:
            # whatever a parser of foreign bytes raises
            raise DataError(f"cannot be decoded ({_plain(exc)})") from exc
        if unpacked > max(_FREE_BYTES, self._limits.max_ratio * size):
            raise DataError(f"unpacks to more than {self._limits.max_ratio} times its size")
        return max(0, min(unpacked, size))

    def _checked(self, record: RawRecord) -> RawRecord | BrokenRecord:
        limit = self._limits.max_record_bytes
        if len(record.content) > limit:
            return too_long(record.name, len(record.content), limit)
        if record.value is None:
            return BrokenRecord(record.name, 0, "no text in this row", is_unsupported=True)
        return record

    def _table(self, stream: BinaryIO) -> Any:
        """Open a file with its text columns behind their dictionaries.

        Raises:
            DataError: It is no Parquet file, or has no text column of the name.
        """
        try:
            schema = self._parquet.ParquetFile(stream).schema_arrow
            types = {name: schema.field(name).type for name in schema.names}
            texts = [name for name, kind in types.items() if self._is_text(kind)]
            table = self._parquet.ParquetFile(
                stream,
                read_dictionary=texts,
                pre_buffer=False,
                buffer_size=_BUFFER_BYTES,
                page_checksum_verification=True,
            )
        except Exception as exc:
            raise DataError(f"is no Parquet file ({_plain(exc)})") from exc
        if self._config.column not in texts:
            names = ", ".join(name[:40] for name in texts[:10]) or "none"
            raise DataError(f"no column {self._config.column[:40]!r} of text; those of text are: {names}; set `column`")
        return table

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))

    def _rows(self, table: Any, group: int) -> Iterator[RawRecord]:
        """The rows of a group: bytes of the text, and what lies beside it; no value where there is no text.

        Raises:
            DataError: They cannot be decoded.
        """
        names = [name for name in dict.fromkeys(self._config.beside) if name in table.schema_arrow.names]
        rows = 0
        try:
            expected = table.metadata.row_group(group).num_rows
            for batch in table.iter_batches(
                _ROWS, row_groups=[group], columns=[self._config.column, *names], use_threads=False
            ):
                rows += batch.num_rows
                columns = {name: _values(batch.column(name)) for name in names}
                for row, content in enumerate(_values(batch.column(self._config.column))):
                    value = None if content is None else {name: _plain_value(columns[name][row]) for name in names}
                    yield RawRecord("", content or b"", value)
        except Exception as exc:
            raise DataError(f"cannot be decoded ({_plain(exc)})") from exc
        if rows != expected:
            raise DataError(f"says that it has {expected} rows, and gives {rows}")

    def _document(self, record: RawRecord) -> Document:
        try:
            text = record.content.decode()
        except UnicodeDecodeError as exc:
            raise DataError(f"{record.name}: byte {exc.start} of its text is not utf-8") from exc
        return document_of(record, text, said_in(record.value, self._config))


def _values(column: Any) -> list[Any]:
    """The values of a column; texts as their bytes, each looked up in the dictionary only here."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    known = column.dictionary.cast("binary")
    return [None if at is None else known[at].as_py() for at in column.indices.to_pylist()]


def _plain_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.isoformat() if isinstance(value, date) else value


def _plain(exc: Exception) -> str:
    return " ".join(str(exc).split())[:120] or type(exc).__name__
