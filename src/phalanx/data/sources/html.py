"""Web pages; the text is taken out by resiliparse, which is an extra."""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from phalanx.data.sources.files import fingerprint_files, list_files, read_text
from phalanx.data.sources.source import Document, SourceSettings
from phalanx.errors import DataError


class HtmlConfig(SourceSettings):
    """Web pages, a file or a directory of ``*.html`` and ``*.htm`` (also ``.gz``); needs the extra `html`.

    With `main_content` navigation, headers and footers are left out.
    """

    kind: Literal["html"] = "html"
    path: Path
    encoding: str = Field(default="utf-8", min_length=1)
    main_content: bool = True


class HtmlFiles:
    """One document per page."""

    def __init__(self, config: HtmlConfig) -> None:
        try:
            extractor = importlib.import_module("resiliparse.extract.html2text")
        except ImportError as exc:
            raise DataError("source kind 'html' needs resiliparse; install phalanx-train[html]") from exc
        self._extract: Callable[..., str] = extractor.extract_plain_text
        self._config = config
        self._files = list_files(config.path, (".html", ".htm"))

    def fingerprint(self) -> str:
        """Digest of names, contents, options and the version of the extractor."""
        version = importlib.metadata.version("resiliparse")
        options = f"html {self._config.encoding} {self._config.main_content} {version}"
        return fingerprint_files(self._files, options)

    def documents(self) -> Iterator[Document]:
        """Pages by name; block structure is kept as line breaks.

        Raises:
            DataError: A page cannot be read or is not in the encoding that the config names.
        """
        for file in self._files:
            page = read_text(file.path, self._config.encoding)
            yield Document(str(file.path), self._extract(page, main_content=self._config.main_content))
