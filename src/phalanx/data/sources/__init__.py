"""Where text comes from; to add a source: one config, one file, one line of the table."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from phalanx.data.config import SourceConfig
from phalanx.data.sources.html import HtmlFiles
from phalanx.data.sources.jsonl import JsonlFiles
from phalanx.data.sources.python_docstrings import PythonDocstrings
from phalanx.data.sources.python_manual import PythonManual
from phalanx.data.sources.source import Document, Source
from phalanx.data.sources.text import TextFiles

SOURCES: Mapping[str, Callable[[Any], Source]] = MappingProxyType(
    {
        "python_manual": PythonManual,
        "python_docstrings": PythonDocstrings,
        "text": TextFiles,
        "jsonl": JsonlFiles,
        "html": HtmlFiles,
    }
)


def open_source(config: SourceConfig) -> Source:
    """Find the source's files; no text is read yet.

    Raises:
        DataError: The path holds nothing of this kind, or an extra is missing.
    """
    return SOURCES[config.kind](config)


__all__ = ["SOURCES", "Document", "Source", "open_source"]
