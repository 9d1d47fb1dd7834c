"""Web pages as files."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.records import FileSettings, RawRecord, RecordFiles, document_of
from phalanx.data.sources.source import BrokenRecord, Document

_XHTML = (".xhtml", ".xht")


class HtmlConfig(FileSettings, PageSettings):
    """Web pages, a file or a directory of ``*.html``, ``*.htm``, ``*.xhtml`` and ``*.xht``; needs the extra `html`.

    They may be packed (``.gz``, ``.zst``). With `main_content` navigation, headers and footers are left out.
    """

    kind: Literal["html"] = "html"


class HtmlFiles(RecordFiles):
    """One record per page, which is its file; block structure is kept as line breaks."""

    def __init__(self, config: HtmlConfig) -> None:
        self._extractor = TextExtractor("html", config)
        super().__init__(config, (".html", ".htm", *_XHTML))
        self._config = config

    def _previous_options(self) -> str | None:
        if self._config.encoding == "detect":
            return None
        return f"html {self._config.encoding} {self._config.main_content} {importlib.metadata.version('resiliparse')}"

    def _library_versions(self) -> list[str]:
        return self._extractor.library_versions()

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        yield self._whole_record(file, name)

    def _make_document(self, record: RawRecord) -> Document:
        is_xhtml = any(suffix.lower() in _XHTML for suffix in Path(record.name).suffixes)
        return document_of(record, self._extractor.extract_text(record.content, None, record.name, is_xhtml=is_xhtml))
