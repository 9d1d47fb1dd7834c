"""A first look at labelled texts of a user's own: which columns hold text and label, and which classes there are."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.tasks.own import Columns, read_records
from phalanx.errors import DataError

_LABELS = ("label", "class", "category", "target", "diagnosis", "topic", "sentiment", "y")
_TEXTS = ("text", "note", "document", "content", "body", "abstract", "review", "sentence", "description")
_FEW_CLASSES = 20
_TEXTS_A_CLASS = 5
"""A column that no name tells is the label where each value stands for so many rows, or there are few values."""


def guess_columns(paths: Sequence[Path]) -> tuple[Columns, int]:
    """Return columns and classes of labelled files that belong together, and how many rows they have.

    Args:
        paths: Files of all clients.

    Raises:
        DataError: A file is malformed, or no column can be the text or the label.
    """
    rows = [record for path in paths for _, record in read_records(path)]
    where = ", ".join(str(path) for path in paths[:2])
    names = sorted({str(name) for row in rows for name in row})
    label = _label_of(rows, names)
    text = _text_of(rows, [name for name in names if name != label])
    if label is None or text is None:
        raise DataError(
            f"{where}: no column is surely {'the label' if label is None else 'the text'}; its columns are "
            f"{', '.join(names) or 'none'}; name them text and label"
        )
    classes = tuple(sorted({_named(row.get(label)) for row in rows} - {""}))
    if len(classes) < 2:
        raise DataError(f"{where}: column {label!r} has one class alone; two at least are learned")
    return Columns(text, label, classes), len(rows)


def _named(value: Any) -> str:
    return str(value).strip() if isinstance(value, str) or type(value) is int else ""


def _known(names: Iterable[str], wanted: Sequence[str]) -> str | None:
    by_name = {name.strip().lower(): name for name in names}
    return next((by_name[one] for one in wanted if one in by_name), None)


def _label_of(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str | None:
    known = _known(names, _LABELS)
    if known is not None:
        return known
    counts = {name: len({_named(row.get(name)) for row in rows}) for name in names}
    most = min(_FEW_CLASSES, len(rows) // _TEXTS_A_CLASS)
    likely = [name for name in names if 2 <= counts[name] <= most and all(_named(row.get(name)) for row in rows)]
    return likely[0] if len(likely) == 1 else None


def _text_of(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str | None:
    known = _known(names, _TEXTS)
    if known is not None:
        return known
    lengths = {name: sum(len(row[name]) for row in rows if isinstance(row.get(name), str)) for name in names}
    return max(lengths, key=lambda name: lengths[name]) if lengths and max(lengths.values()) else None
