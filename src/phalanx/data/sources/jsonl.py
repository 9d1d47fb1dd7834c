"""JSON lines."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Literal

from pydantic import Field

from phalanx.config import unique_keys
from phalanx.data.sources.files import decode_text
from phalanx.data.sources.records import (
    ColumnSettings,
    RawRecord,
    StreamFiles,
    broken_record,
    claims_in,
    document_of,
    read_bounded_line,
)
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_SHOWN_KEYS = 10
_SHOWN_CHARACTERS = 40


class JsonlConfig(ColumnSettings):
    """One JSON object a line, a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``); text in `field`."""

    kind: Literal["jsonl"] = "jsonl"
    field: str = Field(default="text", min_length=1)


class JsonLines(StreamFiles):
    """One record per line, its end included; a blank line holds no text."""

    _UNIT: ClassVar = "line"

    def _cut_stream(self, stream: BinaryIO, limit: int) -> Iterator[bytes | int]:
        while row := read_bounded_line(stream, limit):
            yield row

    def _make_document(self, record: RawRecord) -> Document | BrokenRecord:
        if not record.content.strip():
            return broken_record(record, "blank line", is_unsupported=True)
        return self._document_from_object(record, parse_object(record.content.rstrip(b"\r\n"), record.name))

    @abstractmethod
    def _document_from_object(self, record: RawRecord, content: dict[str, Any]) -> Document | BrokenRecord:
        """Make a document of the object in a line."""


class JsonlFiles(JsonLines):
    """One document per line; a blank line is passed over, anything else malformed is an error."""

    def __init__(self, config: JsonlConfig) -> None:
        super().__init__(config, (".jsonl",))
        self._config = config

    def _previous_options(self) -> str:
        return f"jsonl {self._config.field!r}"

    def _document_from_object(self, record: RawRecord, content: dict[str, Any]) -> Document:
        return document_of(
            record, _text_field(content, self._config.field, record.name), claims_in(content, self._config)
        )


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Read the one object of a line."""
    try:
        record = json.loads(decode_text(line, where), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        # ValueError: bad syntax, a key twice, and an integer of thousands of digits
        raise DataError(f"{where}: is not JSON ({exc}); expected one object a line").with_facts(
            code="PHX-I013", file=where, found=str(exc), expected="one object a line", do="correct that line"
        ) from exc
    if not isinstance(record, dict):
        raise DataError(f"{where}: found a JSON {type(record).__name__}, expected an object")
    return record


def keys_of(record: dict[str, Any]) -> str:
    """The first names of its fields, for a message."""
    return ", ".join(key[:_SHOWN_CHARACTERS] for key in sorted(record)[:_SHOWN_KEYS]) or "none"


def _text_field(record: dict[str, Any], field: str, where: str) -> str:
    text = record.get(field)
    if isinstance(text, str):
        return text
    if field not in record:
        keys = keys_of(record)
        raise DataError(
            f"{where}: no field {field!r}; its fields are: {keys}; set `field` to the text field, or write one text "
            "field on each line"
        ).with_facts(
            code="PHX-I014",
            file=where,
            key="field",
            found=keys,
            expected=field,
            do="set `field` to the text field",
        )
    raise DataError(
        f"{where}: field {field!r} holds a JSON {type(text).__name__}, expected text"
        + ('; use kind = "dialogue" for a chat' if isinstance(text, list) else "")
    ).with_facts(
        code="PHX-I014",
        file=where,
        key="field",
        found=type(text).__name__,
        expected="text",
        do='use kind = "dialogue" for a chat, or name a field of text',
    )
