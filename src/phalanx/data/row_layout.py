"""What the rows of a file are, seen by their columns: conversations, preferences, or plain text.

A look at the first row or at the names of the columns; it decides what a starter writes, and warns where a run or a
recipe reads conversations as text.
"""

import csv
import gzip
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from phalanx.config import printable_text
from phalanx.data.sources.listing import list_files
from phalanx.data.sources.source import SourceSettings
from phalanx.data.sources.turns import turns_of
from phalanx.errors import DataError

RowLayout = Literal["chat", "pairs", "hh", "labelled"]
"""`chat`: conversations, instructions with answers, prompts with completions; the others are shapes of preferences."""

_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}
_ANSWERS = ("completion", "response")
_MAX_LINE_BYTES = 1 << 24
_FIRST_ROWS = 20
_BLOCK_BYTES = 1 << 16


def layout_of(row: Mapping[str, Any]) -> RowLayout | None:
    """Return the layout of a row; None for plain text and unknown layouts."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is not None and rejected is not None:
        is_transcript = isinstance(chosen, str) and "prompt" not in row and "\n\nAssistant:" in chosen
        return "hh" if is_transcript else "pairs"
    if "prompt" in row and "completion" in row and isinstance(row.get("label"), bool | int):
        return "labelled"
    try:
        return "chat" if list(turns_of(row, "auto")) else None
    except DataError:
        return None


def layout_of_columns(names: Sequence[str]) -> RowLayout | None:
    """Return the layout of a table's rows, by the names of its columns alone."""
    columns = set(names)
    if {"chosen", "rejected"} <= columns:
        return "pairs"
    if {"prompt", "completion", "label"} <= columns:
        return "labelled"
    is_asked = "prompt" in columns and not columns.isdisjoint(_ANSWERS)
    is_chat = is_asked or {"instruction", "output"} <= columns or not columns.isdisjoint(("messages", "conversations"))
    return "chat" if is_chat else None


def layout_of_file(path: Path) -> RowLayout | None:
    """Return the layout of the rows of a file; None for text and for a file that cannot be read: a source says why.

    A file of JSON lines is looked at in its first rows, any other table in the names of its columns.
    """
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    kind = next((kind for kind, suffixes in _SUFFIXES.items() if name.endswith(suffixes)), None)
    try:
        if kind == "jsonl":
            rows = (json.loads(row) for row in islice(iterate_lines(path), _FIRST_ROWS) if row.strip())
            return next((layout_of(row) for row in rows if isinstance(row, dict)), None)
        if kind == "csv":
            header = next(iterate_lines(path)).decode("utf-8-sig")
            return layout_of_columns(next(csv.reader([header], delimiter="\t" if ".tsv" in name else ",")))
        if kind == "parquet":
            return layout_of_columns(importlib.import_module("pyarrow.parquet").read_schema(path).names)
    except (OSError, EOFError, ValueError, RecursionError, ImportError, StopIteration, csv.Error):
        return None
    return None


def iterate_lines(file: Path) -> Iterator[bytes]:
    """Give the lines of a file, unpacked where it ends in .gz or .zst; a line beyond 16 MiB ends them."""
    name = file.name.lower()
    zstandard = importlib.import_module("zstandard") if name.endswith(".zst") else None
    with file.open("rb") as packed:
        stream: Any = packed
        if name.endswith(".gz"):
            stream = gzip.open(packed)  # noqa: SIM115 - closed with the file below it
        elif zstandard is not None:
            stream = zstandard.ZstdDecompressor().stream_reader(packed)
        rest = b""
        while block := stream.read(_BLOCK_BYTES):
            *complete_lines, rest = (rest + block).split(b"\n")
            yield from complete_lines
            if len(rest) > _MAX_LINE_BYTES:
                return
        yield rest


def chats_read_as_text(sources: Sequence[SourceSettings], key: str) -> list[str]:
    """Return a warning for each source that reads conversations or preferences as text; one look at its first file."""
    warnings: list[str] = []
    for number, source in enumerate(sources):
        path = getattr(source, "path", None)
        layout = "chat" if source.kind == "dialogue" else _layout_below(path) if isinstance(path, Path) else None
        if layout is None:
            continue
        what, section, way = _CURES["chat" if layout == "chat" else "preferences"]
        warnings.append(
            f"WARNING: {key}.{number}: {printable_text(str(path))} holds {what} and is read as text: every token is "
            f"learned, also those of users, without a chat template. To learn only the answers, use data.{section} "
            f"instead of data.sources; `phalanx init --kind {way}` writes such a run file"
        )
    return warnings


_CURES = {
    "chat": ("conversations", "conversations", "chat"),
    "preferences": ("preferences", "preferences", "preferences"),
}


def _layout_below(path: Path) -> RowLayout | None:
    try:
        files = [
            Path(file.path)
            for file in list_files(path, tuple(ending for ends in _SUFFIXES.values() for ending in ends))
        ]
    except DataError:
        return None
    return layout_of_file(files[0]) if files else None
