"""What a starter reads: the kind of source that a path is of, seen by its files, or a dataset that is built."""

import csv
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.row_layout import RowLayout, iterate_lines, layout_of, layout_of_file
from phalanx.data.shards import DATASET_FILE, open_dataset
from phalanx.data.sources.listing import is_empty, list_files
from phalanx.data.sources.source_code import LANGUAGES
from phalanx.errors import ConfigError, DataError

_SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl",),
    "html": (".html", ".htm"),
    "text": (".txt", ".md"),
    "warc": (".warc", ".wet"),
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv"),
    "mail": (".eml", ".mbox"),
    "epub": (".epub",),
    "code": tuple(suffix for suffixes in LANGUAGES.values() for suffix in suffixes if suffix.startswith(".")),
}
_TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
_PACKED = (".gz", ".zst")
_FEW_FILES = 200


def dataset_section(path: Path) -> tuple[str, int] | None:
    """Return the line of ``[data]`` for a dataset of shards, and the size of its vocabulary; None where it is none."""
    if not (path / DATASET_FILE).is_file():
        return None
    dataset = open_dataset(path)
    entry = f'dataset = {{ path = {quote_path(path)}, signer = "{dataset.signer}" }}'
    return entry, dataset.manifest.tokenizer.vocab_size


def _empty_error(path: Path) -> DataError:
    do = "give a file or a directory of text"
    return DataError(f"{path}: is empty; {do}").with_facts(
        file=str(path), key="--data", found="is empty", expected="text", do=do
    )


def source_line(path: Path) -> tuple[str, int]:
    """Return a source's line for a run file, and its size in bytes."""
    files = [Path(file.path) for file in list_files(path, ("",))]
    if not files:
        raise _empty_error(path)
    sizes = {
        kind: sum(file.stat().st_size for file in files if _is_of(file, suffixes))
        for kind, suffixes in _SUFFIXES.items()
    }
    kind = max(sizes, key=lambda name: sizes[name])
    if is_empty(path):
        raise _empty_error(path)
    if not sizes[kind]:
        raise DataError(
            f"{path}: no text found; expected files that end in "
            f"{', '.join(suffix for name, suffixes in _SUFFIXES.items() if name != 'code' for suffix in suffixes)}, "
            "a programming language's suffix (also .gz and .zst), or a dataset of shards"
        )
    own_files = [file for file in files if _is_of(file, _SUFFIXES[kind])]
    first = next(file for file in own_files if file.stat().st_size)
    kind, more = _kind_and_keys(kind, first)
    if kind == "text" and len(own_files) < _FEW_FILES:
        # documents are held out whole: of a few files there would be none, or a large part
        more = ', delimiter = "\\n\\n"'
    return f'kind = "{kind}", path = {quote_path(path)}{more}', sizes[kind if kind != "dialogue" else "jsonl"]


@dataclass(frozen=True)
class StarterRows:
    """Files of conversations, or of preferences."""

    layout: RowLayout
    paths: tuple[Path, ...]
    size_bytes: int

    @property
    def source_list(self) -> str:
        """The list of sources in a run file."""
        shape = "" if self.layout in ("chat", "pairs") else f', shape = "{self.layout}"'
        return ", ".join(f"{{ path = {quote_path(path)}{shape} }}" for path in self.paths)


def starter_rows(paths: Sequence[Path]) -> StarterRows | None:
    """Return the conversations or preferences that paths hold; None where it is text."""
    layouts: dict[Path, RowLayout | None] = {}
    size_bytes = 0
    for path in paths:
        files = [file for file in list_files(path, _TABLES) if Path(file.path).stat().st_size]
        size_bytes += sum(Path(file.path).stat().st_size for file in files)
        layouts[path] = layout_of_file(Path(files[0].path)) if files else None
        if layouts[path] is not None and not _is_of(Path(files[0].path), _SUFFIXES["jsonl"]):
            raise DataError(
                f"{files[0].path}: a table of conversations or preferences is not supported; convert it to JSON "
                'lines: pandas.read_csv or read_parquet, then .to_json("rows.jsonl", orient="records", lines=True)'
            )
    kinds = set(layouts.values())
    if len(kinds) > 1:
        held = ", ".join(f"{path}: {layout or 'text'}" for path, layout in layouts.items())
        raise ConfigError(f"data: a run learns from rows of one kind, found {held}; give rows of one kind")
    layout = kinds.pop() if kinds else None
    return None if layout is None else StarterRows(layout, tuple(paths), size_bytes)


def quote_path(path: Path) -> str:
    """Return a path as TOML has it."""
    return json.dumps(str(path), ensure_ascii=False)


def _kind_and_keys(kind: str, first: Path) -> tuple[str, str]:
    """Return the kind that a source's first file shows, and the keys that name its text."""
    if kind == "jsonl":
        record = _first_record(first)
        if isinstance(record, dict) and layout_of(record) == "chat":
            return "dialogue", ""
        return kind, f", field = {json.dumps(_text_field(record, first))}"
    if kind == "csv":
        return kind, f", template = {json.dumps('{' + _text_column(first) + '}')}"
    if kind == "parquet":
        return kind, f", column = {json.dumps(_parquet_column(first))}"
    return kind, ""


def _is_of(file: Path, suffixes: Sequence[str]) -> bool:
    name = file.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return name.endswith(tuple(suffixes))


def _first_record(file: Path) -> Any:
    try:
        return json.loads(next(iterate_lines(file)))
    except (OSError, EOFError, ValueError, RecursionError, ImportError) as exc:
        raise DataError(f"{file}, line 1: not JSON ({exc}); expected one object a line") from exc


def _text_field(record: Any, file: Path) -> str:
    """Choose the field of the first record that holds its text: `text`, else the longest one."""
    fields = record.items() if isinstance(record, dict) else ()
    texts: dict[str, str] = {str(name): value for name, value in fields if isinstance(value, str)}
    if isinstance(texts.get("text"), str):
        return "text"
    if texts and max(map(len, texts.values())):
        return max(texts, key=lambda name: len(texts[name]))
    raise DataError(f"{file}, line 1: no field with text; expected an object with one text")


def _text_column(file: Path) -> str:
    """Choose the column of a table that holds its text: `text`, else the longest cell of the first row."""
    delimiter = "\t" if ".tsv" in file.name.lower() else ","
    try:
        lines = (row.decode("utf-8-sig") + "\n" for row in iterate_lines(file))
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        names, cells = next(rows), next(rows)
    except (OSError, EOFError, ValueError, csv.Error, StopIteration, ImportError) as exc:
        raise _no_table(file, str(exc) or type(exc).__name__) from exc
    if len(names) == 1 and any(sign in names[0] for sign in ";|\t,"):
        raise _no_table(file, f"its one column is {names[0][:40]!r}")
    sizes = {name: len(cell) for name, cell in zip(names, cells, strict=False)}
    if not sizes:
        raise _no_table(file, "its first row has no cell")
    return "text" if "text" in sizes else max(sizes, key=sizes.__getitem__)


def _no_table(file: Path, why: str) -> DataError:
    return DataError(
        f"{file}: not a table with a row of names and a row of text ({why}); write it in UTF-8, with commas between "
        "cells, or tabs where it ends in .tsv; or set `delimiter` of a csv source in a run file"
    )


def _parquet_column(file: Path) -> str:
    """Choose the column of text: `text`, else the first one."""
    try:
        parquet, types = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow.types")
    except ImportError as exc:
        raise DataError("source kind 'parquet' needs pyarrow; install phalanx-train[data]") from exc
    try:
        schema = parquet.read_schema(file)
    except Exception as exc:
        # whatever a parser of foreign bytes raises
        raise DataError(f"{file}: not a Parquet file") from exc
    kinds = {one.name: one.type.value_type if types.is_dictionary(one.type) else one.type for one in schema}
    texts = [name for name, kind in kinds.items() if str(kind) in ("string", "large_string", "string_view")]
    if not texts:
        raise DataError(f"{file}: no column of text")
    return "text" if "text" in texts else str(texts[0])
