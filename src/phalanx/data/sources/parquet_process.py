"""The process that decodes Parquet: ``python -m phalanx.data.sources.parquet_process``, bounded in memory.

pyarrow trusts a file's own sizes, and can ask for any memory, or end its process. An order to open a file is answered
with its row groups, one to read a group with its rows, and then a message with ``end``; or with an error.
"""

import importlib
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.child import Message, answer_orders, die_with_parent
from phalanx.data.sources.files import SourceFile
from phalanx.errors import DataError

_ROWS = 64
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
_LOOKED_AT_GROUPS = 10_000
_BUFFER_BYTES = 1 << 20
_SHOWN = 120
MEMORY_BYTES = 1 << 30
"""Beside what the process starts with: pages of a table that was written for reading take a small part of it."""


class Decoder:
    """The tables of one file after the other."""

    def __init__(self) -> None:
        self._arrow: Any = importlib.import_module("pyarrow")
        self._parquet: Any = importlib.import_module("pyarrow.parquet")
        self._stream: BinaryIO | None = None
        self._table: Any = None

    def open_file(self, path: str, column: str) -> int:
        """Open a file with its text columns behind their dictionaries, and return its row groups."""
        if self._stream is not None:
            self._stream.close()
        stream = self._stream = SourceFile("", path if "://" in path else Path(path)).open_bytes()
        try:
            file = self._parquet.ParquetFile(stream)
            schema = file.schema_arrow
            types = {name: schema.field(name).type for name in schema.names}
            texts = [name for name, kind in types.items() if self._is_text(kind)]
            self._table = self._parquet.ParquetFile(
                stream,
                read_dictionary=[name for name in texts if self._has_dictionary(file.metadata, name, types[name])],
                pre_buffer=False,
                buffer_size=_BUFFER_BYTES,
                page_checksum_verification=True,
            )
            groups = int(self._table.num_row_groups)
        except Exception as exc:
            # whatever a parser of foreign bytes raises
            raise DataError(f"is no Parquet file ({_error_text(exc)})") from exc
        if column not in texts:
            names = ", ".join(name[:40] for name in texts[:10]) or "none"
            what = f"column {column[:40]!r} holds {types[column]}, expected text" if column in types else ""
            raise DataError(f"{what or f'no column {column[:40]!r} of text'}; those of text are: {names}; set `column`")
        return groups

    def group_sizes(self, group: int) -> tuple[int, int]:
        """The bytes of a row group, unpacked, and its rows, as the file says.

        Sizes of single columns are not asked for: pyarrow ends the process where these are malformed.
        """
        try:
            row_group = self._table.metadata.row_group(group)
            return max(0, int(row_group.total_byte_size)), max(0, int(row_group.num_rows))
        except Exception as exc:
            raise DataError(f"cannot be decoded ({_error_text(exc)})") from exc

    def group_rows(self, group: int, column: str, beside: list[str]) -> Iterator[tuple[bytes | None, dict[str, Any]]]:
        """The rows of a group: bytes of the text, and what lies beside it."""
        names = [name for name in dict.fromkeys(beside) if name in self._table.schema_arrow.names]
        rows = 0
        try:
            expected = self._table.metadata.row_group(group).num_rows
            for batch in self._table.iter_batches(
                _ROWS, row_groups=[group], columns=[column, *names], use_threads=False
            ):
                rows += batch.num_rows
                columns = {name: list(_column_values(self._simplify(batch.column(name)))) for name in names}
                for row, content in enumerate(_column_values(batch.column(column))):
                    yield content, {name: _plain_value(columns[name][row]) for name in names}
        except Exception as exc:
            raise DataError(f"cannot be decoded ({_error_text(exc)})") from exc
        if rows != expected:
            raise DataError(f"says that it has {expected} rows, and gives {rows}")

    def _simplify(self, column: Any) -> Any:
        """Return a column beside the text in a type whose values Python has: one of nanoseconds raises for a row."""
        types, kind = self._arrow.types, column.type
        if types.is_timestamp(kind) and kind.unit == "ns":
            return column.cast(self._arrow.timestamp("us", kind.tz), safe=False)
        # no document keeps these
        is_other = any(is_kind(kind) for is_kind in (types.is_nested, types.is_time, types.is_duration))
        return self._arrow.nulls(len(column)) if is_other else column

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return any(getattr(types, f"is_{name}", lambda _: False)(kind) for name in _TEXT_TYPES)

    def _has_dictionary(self, metadata: Any, name: str, kind: Any) -> bool:
        """Whether a column's values can stay behind their dictionary, which pyarrow has not for views and deltas."""
        types = self._arrow.types
        if not (types.is_dictionary(kind) or types.is_string(kind) or types.is_binary(kind)):
            return False
        place = [metadata.schema.column(number).path for number in range(metadata.num_columns)].index(name)
        groups = range(min(metadata.num_row_groups, _LOOKED_AT_GROUPS))
        codes = {code for group in groups for code in metadata.row_group(group).column(place).encodings}
        return not any(code.startswith("DELTA") for code in codes)


def main() -> None:
    """Answer orders until there are no more."""
    die_with_parent()
    decoder = Decoder()

    def answer(order: dict[str, Any], _: bytes) -> Iterator[Message]:
        try:
            yield from _answer_order(decoder, order)
        except DataError as exc:
            yield {"error": str(exc)}, b""

    answer_orders(answer, MEMORY_BYTES)


def _answer_order(decoder: Decoder, order: dict[str, Any]) -> Iterator[Message]:
    match order["act"]:
        case "open":
            yield {"groups": decoder.open_file(order["path"], order["column"]), "end": True}, b""
        case "claims":
            size, rows = decoder.group_sizes(order["group"])
            yield {"size": size, "rows": rows, "end": True}, b""
        case _:
            for content, beside in decoder.group_rows(order["group"], order["column"], order["beside"]):
                yield {"beside": None if content is None else beside, "end": False}, content or b""
            yield {"end": True}, b""


def _column_values(column: Any) -> Iterator[Any]:
    """The values of a column; texts as their bytes, each looked up in the dictionary only here."""
    if not hasattr(column, "dictionary"):
        # bytes, so that what is no UTF-8 is told of and not raised by pyarrow
        is_text = str(column.type) in ("string", "large_string", "string_view")
        yield from (column.cast("large_binary") if is_text else column).to_pylist()
        return
    values = column.dictionary.cast("binary")
    for index in column.indices.to_pylist():
        yield None if index is None else values[index].as_py()


def _plain_value(value: Any) -> str | int | float | None:
    """Return a value that a document can keep; None of any other one."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if isinstance(value, str | int | float) else None


def _error_text(exc: Exception) -> str:
    return " ".join(str(exc).split())[:_SHOWN] or type(exc).__name__


if __name__ == "__main__":
    main()
