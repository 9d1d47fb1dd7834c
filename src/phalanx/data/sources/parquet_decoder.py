"""The processes that decode Parquet, as a source sees them: a table at a time, and another one where one has ended."""

import contextlib
from collections.abc import Iterator
from typing import Any

from phalanx.child import Message
from phalanx.data.sources.reader_process import ReaderProcess
from phalanx.errors import DataError

_MODULE = "phalanx.data.sources.parquet_process"
_MAX_ENDS = 3
"""Decoders that one file may end before no more of it is read."""


class ParquetTable:
    """One file, decoded elsewhere."""

    def __init__(self, path: str, column: str) -> None:
        self._file_order = {"path": path, "column": column}
        self._decoder: ReaderProcess | None = None
        self._ends, self._is_between = 0, True

    def num_groups(self) -> int:
        """Row groups of the file."""
        return int(self._ask_once(act="open", **self._file_order)["groups"])

    def claimed_sizes(self, group: int) -> tuple[int, int]:
        """The bytes of a row group, unpacked, and its rows, as the file says."""
        answer = self._ask_once(act="claims", group=group)
        return int(answer["size"]), int(answer["rows"])

    def read_group(self, group: int, beside: list[str]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """The rows of a group: bytes of the text, and what lies beside it; None where there is no text."""
        asked = self._ask_decoder(act="rows", group=group, column=self._file_order["column"], beside=beside)
        yield from ((content, answer["beside"]) for answer, content in asked if not answer["end"])

    def close(self) -> None:
        """Leave the decoder to the next file, or end it where it is in the middle of an answer."""
        if self._decoder is None or self._decoder.exit_code is not None:
            return
        if self._is_between:
            self._decoder.give_back()
        else:
            self._decoder.close()

    def _ask_once(self, **order: Any) -> dict[str, Any]:
        ((answer, _),) = self._ask_decoder(**order)
        return answer

    def _ask_decoder(self, **order: Any) -> Iterator[Message]:
        decoder = self._ready_decoder(order)
        self._is_between = False
        try:
            yield from decoder.read(order)
        except DataError:
            self._ends += decoder.exit_code is not None
            self._is_between = True
            raise
        self._is_between = True

    def _ready_decoder(self, order: dict[str, Any]) -> ReaderProcess:
        """Return a decoder that has the file open, or is to open it."""
        if self._decoder is not None and self._decoder.exit_code is None:
            return self._decoder
        if self._ends >= _MAX_ENDS:
            raise DataError(f"not read: the file has ended {_MAX_ENDS} processes that read it")
        decoder = self._decoder = ReaderProcess.take_idle(_MODULE)
        if order["act"] != "open":
            list(decoder.read({"act": "open", **self._file_order}))
        return decoder


@contextlib.contextmanager
def open_table(path: str, column: str) -> Iterator[ParquetTable]:
    """Open a file in a process that is bounded in memory."""
    table = ParquetTable(path, column)
    try:
        yield table
    finally:
        table.close()
