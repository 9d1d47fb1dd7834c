"""Plain text files."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from phalanx.data.sources.files import SourceFile, decode
from phalanx.data.sources.packed import Damage
from phalanx.data.sources.records import (
    FileSettings,
    RawRecord,
    RecordFiles,
    document_of,
    lost,
    parts_of,
    too_long,
)
from phalanx.data.sources.source import BrokenRecord, Document

_SUFFIXES = (".txt", ".md")


class TextConfig(FileSettings):
    """UTF-8 text, a file or a directory of ``*.txt`` and ``*.md`` (also ``.gz``, ``.zst``).

    One document per file, or, with `delimiter`, one per part between two delimiters.
    """

    kind: Literal["text"] = "text"
    delimiter: str | None = Field(default=None, min_length=1)
    max_record_bytes: int = Field(default=1 << 30, ge=1)


class TextFiles(RecordFiles):
    """One record per file, or per part with the delimiter behind it; one record is in memory at a time."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config, _SUFFIXES)
        self._delimiter = config.delimiter

    def _options_before(self) -> str:
        return f"text {self._delimiter!r}"

    def _records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        if self._delimiter is None:
            yield self._whole(file, name)
            return
        number, limit = 0, self._limits.max_record_bytes
        for run in self._runs(file):
            if isinstance(run, Damage):
                yield lost(name, run)
                continue
            for part in parts_of(run, self._delimiter.encode(), limit):
                number += 1
                where = f"{name}, part {number}"
                yield too_long(where, part, limit) if isinstance(part, int) else RawRecord(where, part)

    def _document(self, record: RawRecord) -> Document:
        return document_of(record, decode(record.content, record.name).removesuffix(self._delimiter or ""))
