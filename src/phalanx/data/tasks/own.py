"""Labelled texts of a user's own: CSV, TSV or JSON lines, read strictly; faults are named by file and line."""

import csv
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.data.normal_form import check_text
from phalanx.data.sources.files import read_lines, read_text
from phalanx.data.sources.jsonl import parse_object
from phalanx.data.tasks.task import Example
from phalanx.errors import DataError

_SHOWN = 60
_SHOWN_FIELDS = 10
_MAX_CHARACTERS = 1 << 24
"""Of a field of a table; Python's own limit is far below a long report."""


@dataclass(frozen=True)
class Columns:
    """Where text and label are, and which labels there are.

    Attributes:
        classes: Every label; a class is an index of them.
    """

    text: str
    label: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class PlacedExample:
    """A text with its class, and where it stands."""

    example: Example
    where: str


def load_own(train: Path, test: Path, columns: Columns) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Read the training texts and the held-out texts of one client; every row is used.

    Raises:
        DataError: A file is missing, malformed or empty, a label is no class, or a text is in both files.
    """
    learned, held_out = read_examples(train, columns), read_examples(test, columns)
    places = {record.example.text: record.where for record in learned}
    for record in held_out:
        if record.example.text in places:
            raise DataError(
                f"{record.where}: this text is also a training text ({places[record.example.text]}), so its class "
                "would prove nothing; remove it from one file"
            )
    return tuple(record.example for record in learned), tuple(record.example for record in held_out)


def read_examples(path: Path, columns: Columns) -> list[PlacedExample]:
    """Read one file; its suffix tells the format, ``.gz`` behind it is unpacked."""
    examples = [_make_example(record, place, columns) for place, record in read_records(path)]
    if not examples:
        state = "has no text" if path.stat().st_size else "is empty"
        raise DataError(f"{path}: {state}; give a file with at least one row")
    return examples


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the rows of one file, each with its place, whatever columns it has."""
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    reader = _READERS.get(suffix.lower())
    if reader is None:
        raise DataError(f"{path}: expected a file that ends in {', '.join(_READERS)}, with or without .gz")
    if not path.is_file():
        raise DataError(f"{path}: is not a file; give the path of a file with labelled texts")
    return reader(path)


def _make_example(record: dict[str, Any], where: str, columns: Columns) -> PlacedExample:
    for name in (columns.text, columns.label):
        if name not in record:
            keys = ", ".join(sorted(map(str, record))[:_SHOWN_FIELDS]) or "none"
            raise DataError(f"{where}: no column {name!r}; its columns are: {keys}; set `text` and `label`")
    text, label = record[columns.text], record[columns.label]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: column {columns.text!r} has no text; remove the row, or fill it in")
    check_text(text, where)
    # a whole number may stand for a class
    named = str(label) if type(label) is int else label
    if not isinstance(named, str) or named.strip() not in columns.classes:
        raise DataError(
            f"{where}: label {str(label)[:_SHOWN]!r} is not among the classes {_shown_names(columns.classes)}; "
            "correct it, or add it to the run file"
        )
    return PlacedExample(Example(" ".join(text.split()), columns.classes.index(named.strip())), where)


def _shown_names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:_SHOWN_FIELDS]) + (", ..." if len(names) > _SHOWN_FIELDS else "")


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(read_lines(path), start=1):
        if not row.strip():
            continue
        place = f"{path}, line {number}"
        yield place, parse_object(row, place)


def _read_table(path: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # the limit is one of the process: no other reader here has a lower one
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CHARACTERS))
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        names = rows.fieldnames or ()
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1: names a column twice ({_shown_names(names)}); rename one")
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{place}: has another number of fields than the first line; quote fields with {delimiter!r}"
                )
            yield place, row
    except csv.Error as exc:
        raise DataError(
            f"{path}, line {rows.line_num + 1}: is not a row of a table ({exc}); quote fields as RFC 4180 has it"
        ) from exc


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = MappingProxyType(
    {
        ".csv": functools.partial(_read_table, delimiter=","),
        ".tsv": functools.partial(_read_table, delimiter="\t"),
        ".jsonl": _read_json_lines,
    }
)


_LABELS = ("label", "class", "category", "target", "diagnosis", "topic", "sentiment", "y")
_TEXTS = ("text", "note", "document", "content", "body", "abstract", "review", "sentence", "description")
_FEW_CLASSES = 20
_TEXTS_A_CLASS = 5
"""A column that no name tells is the label where each value stands for so many rows, or there are few values."""


def guess_columns(paths: Sequence[Path]) -> tuple[Columns, int]:
    """Return columns and classes of labelled files that belong together, and how many rows they have."""
    rows = [record for path in paths for _, record in read_records(path)]
    place = ", ".join(str(path) for path in paths[:2])
    names = sorted({str(name) for row in rows for name in row})
    label = _guess_label_column(rows, names)
    text = _guess_text_column(rows, [name for name in names if name != label])
    if label is None or text is None:
        raise DataError(
            f"{place}: cannot tell the column of {'the label' if label is None else 'the text'}; its columns are "
            f"{', '.join(names) or 'none'}; name them text and label"
        )
    classes = tuple(sorted({_label_text(row.get(label)) for row in rows} - {""}))
    if len(classes) < 2:
        raise DataError(f"{place}: column {label!r} has one class only; at least two are needed")
    return Columns(text, label, classes), len(rows)


def _label_text(value: Any) -> str:
    return str(value).strip() if isinstance(value, str) or type(value) is int else ""


def _find_column(names: Iterable[str], wanted: Sequence[str]) -> str | None:
    by_name = {name.strip().lower(): name for name in names}
    return next((by_name[name] for name in wanted if name in by_name), None)


def _guess_label_column(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str | None:
    column = _find_column(names, _LABELS)
    if column is not None:
        return column
    counts = {name: len({_label_text(row.get(name)) for row in rows}) for name in names}
    max_classes = min(_FEW_CLASSES, len(rows) // _TEXTS_A_CLASS)
    likely = [
        name for name in names if 2 <= counts[name] <= max_classes and all(_label_text(row.get(name)) for row in rows)
    ]
    return likely[0] if len(likely) == 1 else None


def _guess_text_column(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str | None:
    column = _find_column(names, _TEXTS)
    if column is not None:
        return column
    lengths = {name: sum(len(row[name]) for row in rows if isinstance(row.get(name), str)) for name in names}
    return max(lengths, key=lambda name: lengths[name]) if lengths and max(lengths.values()) else None
