"""Tables of text: CSV and TSV, each row put into a template."""

import csv
import string
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, Self

from pydantic import Field, model_validator

from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.packed import Damage
from phalanx.data.sources.records import (
    ColumnSettings,
    RawRecord,
    RecordFiles,
    break_torn_records,
    claims_in,
    damage_record,
    document_of,
    oversized_record,
    read_bounded_line,
)
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_SUFFIXES = (".csv", ".tsv")


class CsvConfig(ColumnSettings):
    """Tables, a file or a directory of ``*.csv`` and ``*.tsv`` (also ``.gz``, ``.zst``); the first row names columns.

    Attributes:
        template: The text of a row, with columns in braces; a brace is written twice.
        delimiter: Between cells; left out, a comma in ``.csv`` and a tab in ``.tsv``.
    """

    kind: Literal["csv"] = "csv"
    template: str = Field(default="{text}", min_length=1)
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError as exc:
            raise ValueError(f"template: {exc}; write columns in braces, and a brace twice") from exc
        if any(spec or conversion for _, _, spec, conversion in parts):
            raise ValueError("template: a column is only its name in braces")
        if not any(name for _, name, _, _ in parts):
            raise ValueError("template: names no column; write columns in braces")
        return self

    @property
    def template_columns(self) -> list[str]:
        """The columns that the template names."""
        return [name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None]


class CsvFiles(RecordFiles):
    """One record per row, its line ends included; the first row is counted, and is no text."""

    def __init__(self, config: CsvConfig) -> None:
        super().__init__(config, _SUFFIXES)
        self._config = config

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        return break_torn_records(self._cut_rows(file, name), name, b"\n")

    def _cut_rows(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        delimiter = self._config.delimiter or ("\t" if ".tsv" in file.name.lower()[-8:] else ",")
        names: list[str] | None = None
        number = 0
        for run in self._open_runs(file):
            if isinstance(run, Damage):
                yield damage_record(name, run)
                continue
            for row in _RowReader(run, delimiter, self._limits.max_record_bytes):
                number += 1
                place = f"{name}, row {number}"
                if isinstance(row, BrokenRecord):
                    yield BrokenRecord(place, row.raw_bytes, row.reason, row.is_unsupported)
                elif names is None:
                    names = row.value
                    yield self._check_header(place, row)
                else:
                    yield RawRecord(place, row.content, (names, row.value))

    def _check_header(self, name: str, header: RawRecord) -> BrokenRecord:
        missing = [column for column in self._config.template_columns if column not in header.value]
        if not missing and len(set(header.value)) == len(header.value):
            return BrokenRecord(name, len(header.content), "names of the columns", is_unsupported=True)
        names = ", ".join(cell[:40] for cell in header.value[:10])
        if len(set(header.value)) < len(header.value):
            return BrokenRecord(name, len(header.content), f"names a column twice: {names}")
        has_other = len(header.value) == 1 and any(sign in header.value[0] for sign in ";\t|,")
        key = "delimiter" if has_other else "template"
        return BrokenRecord(
            name, len(header.content), f"no column {missing[0][:40]!r}; its columns are: {names}; set `{key}`"
        )

    def _make_document(self, record: RawRecord) -> Document:
        names, cells = record.value
        if len(names) != len(cells):
            raise DataError(
                f"{record.name}: has {len(cells)} cells, expected {len(names)} as in the first row; quote cells that "
                "hold a delimiter"
            )
        row = dict(zip(names, cells, strict=True))
        for column in self._config.template_columns:
            if column not in row:
                raise DataError(f"{record.name}: no column {column[:40]!r}")
        text = "".join(
            before + ("" if name is None else row[name])
            for before, name, _, _ in string.Formatter().parse(self._config.template)
        )
        return document_of(record, text, claims_in({**row, **_number_fields(row, self._config)}, self._config))


def _number_fields(row: dict[str, str], config: CsvConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in config.fields:
        cell = row.get(name, "")
        for kind in (int, float):
            try:
                fields[name] = kind(cell)
                break
            except ValueError:
                continue
    return fields


class _RowReader:
    """Rows of a stream with their bytes; the reader of the standard library asks for lines, which are counted."""

    def __init__(self, stream: BinaryIO, delimiter: str, limit: int) -> None:
        # the limit is one of the process: no other reader here has a lower one
        csv.field_size_limit(max(csv.field_size_limit(), limit))
        self._stream, self._limit = stream, limit
        self._lines: list[bytes] = []
        self._size, self._is_first = 0, True
        self._too_long = False
        self._reader = csv.reader(self._counted_lines(), delimiter=delimiter, strict=True)
        self._delimiter = delimiter

    def _counted_lines(self) -> Iterator[str]:
        while row := read_bounded_line(self._stream, self._limit):
            size = row if isinstance(row, int) else len(row)
            self._size += size
            if isinstance(row, int) or self._size > self._limit:
                self._too_long = True
                self._lines.clear()
                # the row ends here for the reader, whatever quotation marks are open
                return
            self._lines.append(row)
            text = row.decode("utf-8", "surrogateescape")
            yield text.removeprefix("\ufeff") if self._is_first else text
            self._is_first = False

    def __iter__(self) -> Iterator[RawRecord | BrokenRecord]:
        while True:
            self._lines, self._size, self._too_long = [], 0, False
            reason, cells = "", None
            try:
                cells = next(self._reader, None)
            except csv.Error as exc:
                reason = f"is no row of a table ({exc}); quote cells as RFC 4180 has it"
            content = b"".join(self._lines)
            if self._too_long:
                yield oversized_record("", self._size, self._limit)
            elif reason:
                yield BrokenRecord("", self._size, reason)
            elif cells is None:
                return
            elif not cells:
                yield BrokenRecord("", self._size, "blank line", is_unsupported=True)
            else:
                yield _decode_row(content, cells)
            if self._too_long or reason:
                self._reader = csv.reader(self._counted_lines(), delimiter=self._delimiter, strict=True)


def _decode_row(content: bytes, cells: list[str]) -> RawRecord | BrokenRecord:
    try:
        content.decode()
    except UnicodeDecodeError as exc:
        return BrokenRecord("", len(content), f"byte {exc.start} (0x{content[exc.start]:02x}) is not utf-8")
    return RawRecord("", content, cells)
