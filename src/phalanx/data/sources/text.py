"""Plain text files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from phalanx.data.sources.files import fingerprint_files, list_files, read_text
from phalanx.data.sources.source import Document, SourceSettings

_SUFFIXES = (".txt", ".md")


class TextConfig(SourceSettings):
    """UTF-8 text, a file or a directory of ``*.txt`` and ``*.md`` (also ``.gz``).

    One document per file, or, with `delimiter`, one per part between two delimiters.
    """

    kind: Literal["text"] = "text"
    path: Path
    delimiter: str | None = Field(default=None, min_length=1)


class TextFiles:
    """One document per file, or per part between delimiters; one file is in memory at a time."""

    def __init__(self, config: TextConfig) -> None:
        self._delimiter = config.delimiter
        self._files = list_files(config.path, _SUFFIXES)

    def fingerprint(self) -> str:
        """Digest of names, contents and delimiter."""
        return fingerprint_files(self._files, f"text {self._delimiter!r}")

    def documents(self) -> Iterator[Document]:
        """Files by name, parts in order.

        Raises:
            DataError: A file cannot be read or is not UTF-8.
        """
        for file in self._files:
            text = read_text(file.path)
            if self._delimiter is None:
                yield Document(str(file.path), text)
                continue
            for number, part in enumerate(text.split(self._delimiter), start=1):
                yield Document(f"{file.path}, part {number}", part)
