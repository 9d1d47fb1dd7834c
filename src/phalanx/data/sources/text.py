"""Plain text files."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, ClassVar, Literal

from pydantic import Field

from phalanx.config.strict import later_key
from phalanx.data.sources.charsets import MARKS
from phalanx.data.sources.files import SourceFile, decode_text
from phalanx.data.sources.records import (
    FileSettings,
    RawRecord,
    StreamFiles,
    break_torn_records,
    document_of,
    split_stream,
    strip_delimiter,
)
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.data.sources.spans import FileSpan

_SUFFIXES = (".txt", ".md")
_WIDE_MARKS = ((codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"))
"""The first one begins as that of UTF-16 does."""


class TextConfig(FileSettings):
    """UTF-8 text, a file or a directory of ``*.txt`` and ``*.md`` (also ``.gz``, ``.zst``).

    One document per file, or, with `delimiter`, one per part between two delimiters. A file that is not cut into parts
    may be in UTF-16 with a byte order mark, as Windows writes it. A line end of the delimiter (LF) matches CR LF too.
    """

    kind: Literal["text"] = "text"
    delimiter: str | None = Field(default=None, min_length=1)
    max_record_bytes: int = later_key(1 << 30, ge=1)


class TextFiles(StreamFiles):
    """One record per file, or per part with the delimiter behind it; one record is in memory at a time."""

    _UNIT: ClassVar = "part"

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config, _SUFFIXES)
        self._delimiter = config.delimiter

    def _previous_options(self) -> str:
        return f"text {self._delimiter!r}"

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        if self._delimiter is None:
            yield self._whole_record(file, name)
        else:
            yield from break_torn_records(super()._cut_records(file, name), name, self._delimiter.encode())

    def _cut_stream(self, stream: BinaryIO, limit: int) -> Iterator[bytes | int]:
        return split_stream(stream, (self._delimiter or "").encode(), limit)

    def cut_spans(self, file: SourceFile, min_bytes: int) -> list[FileSpan]:
        """Cut a file between its parts; without a delimiter it has none."""
        return [] if self._delimiter is None else super().cut_spans(file, min_bytes)

    def _make_document(self, record: RawRecord) -> Document:
        # a part of a file has no mark of its own
        marks = () if self._delimiter is not None else (*_WIDE_MARKS, *MARKS)
        encoding = next((codec for mark, codec in marks if record.content.startswith(mark)), "utf-8")
        content = strip_delimiter(record.content, self._delimiter.encode()) if self._delimiter else record.content
        return document_of(record, decode_text(content, record.name, encoding))
