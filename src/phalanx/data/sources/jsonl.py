"""JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from phalanx.data.sources.files import decode, fingerprint_files, list_files, read_lines
from phalanx.data.sources.source import Document, SourceSettings
from phalanx.errors import DataError


class JsonlConfig(SourceSettings):
    """One JSON object a line, a file or a directory of ``*.jsonl`` (also ``.gz``); the text is in `field`."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    field: str = Field(default="text", min_length=1)


class JsonlFiles:
    """One document per line; a blank line is passed over, anything else malformed is an error."""

    def __init__(self, config: JsonlConfig) -> None:
        self._field = config.field
        self._files = list_files(config.path, (".jsonl",))

    def fingerprint(self) -> str:
        """Digest of names, contents and field."""
        return fingerprint_files(self._files, f"jsonl {self._field!r}")

    def documents(self) -> Iterator[Document]:
        """Files by name, lines in order.

        Raises:
            DataError: Names the file and the line, and says what was found and expected.
        """
        for file in self._files:
            for number, line in enumerate(read_lines(file.path), start=1):
                if line.strip():
                    where = f"{file.path}, line {number}"
                    yield Document(where, self._text(line, where))

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(decode(line, where))
        except (json.JSONDecodeError, RecursionError) as exc:
            raise DataError(f"{where}: is not JSON ({exc}); expected one object a line").about(
                code="PHX-I013", file=where, expected="one object a line"
            ) from exc
        if not isinstance(record, dict):
            raise DataError(f"{where}: found a JSON {type(record).__name__}, expected an object")
        text = record.get(self._field)
        if isinstance(text, str):
            return text
        if self._field not in record:
            keys = ", ".join(sorted(record)[:10]) or "none"
            raise DataError(
                f"{where}: no field {self._field!r}; its fields are: {keys}; set `field` to the one with the text, or "
                "write one text a line where it takes several"
            ).about(code="PHX-I014", file=where, key="field", found=keys, expected=self._field)
        raise DataError(
            f"{where}: field {self._field!r} holds a JSON {type(text).__name__}, expected text"
            + ("; a chat is not rendered here: write each conversation as one text" if isinstance(text, list) else "")
        ).about(code="PHX-I014", file=where, key="field", found=type(text).__name__, expected="text")
