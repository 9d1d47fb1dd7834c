"""The processes that decode Parquet, as a source sees them: a table at a time, and another one where one has ended."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

from phalanx.child import PARENT
from phalanx.errors import DataError

_MODULE = "phalanx.data.sources.parquet_process"
_MOST_LINE_BYTES = 1 << 24
_MOST_ENDS = 3
"""Decoders that one file may end before no more of it is read."""
Answer = tuple[dict[str, Any], bytes]


class _Decoder:
    """One process, bounded in memory, and the pipes to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
            # other allocators reserve more than the bound before they give any
            env={**os.environ, PARENT: str(os.getpid()), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        self.of_process = os.getpid()

    def ask(self, **order: Any) -> Iterator[Answer]:
        """Yield what it answers until it says that this is all.

        Raises:
            DataError: It says what is wrong; or it has ended, which `has_ended` then tells.
        """
        with contextlib.suppress(BrokenPipeError):
            self._pipe("stdin").write(json.dumps(order).encode() + b"\n")
            self._pipe("stdin").flush()
        while True:
            line = self._pipe("stdout").readline(_MOST_LINE_BYTES)
            answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
            content = self._pipe("stdout").read(answer["bytes"]) if answer else b""
            if not answer or len(content) < answer["bytes"]:
                self.end()
                raise DataError("cannot be decoded (it asked for too much memory, or ended the process that reads it)")
            if "error" in answer:
                raise DataError(answer["error"])
            if answer["end"]:
                yield answer, content
                return
            yield answer, content

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] | None = getattr(self._process, name)
        if pipe is None:
            raise DataError("the process that decodes Parquet has no pipe")
        return pipe


_IDLE: list[_Decoder] = []
"""Decoders of this process between two files: one takes half a second to start."""


@atexit.register
def _end_idle() -> None:
    while _IDLE:
        decoder = _IDLE.pop()
        if decoder.of_process == os.getpid():
            decoder.end()


def _take() -> _Decoder:
    while _IDLE:
        decoder = _IDLE.pop()
        # a process that was forked has its starter's pipes, and must not write into them
        if decoder.of_process == os.getpid() and not decoder.has_ended:
            return decoder
    return _Decoder()


class ParquetTable:
    """One file, decoded elsewhere.

    Args:
        path: Of the file, or its address.
        column: Of the text.
    """

    def __init__(self, path: str, column: str) -> None:
        self._about = {"path": path, "column": column}
        self._decoder: _Decoder | None = None
        self._ends, self._is_between = 0, True

    def num_groups(self) -> int:
        """Row groups of the file.

        Raises:
            DataError: It is no Parquet file, or has no such column.
        """
        return int(self._asked(act="open", **self._about)["groups"])

    def claims(self, group: int) -> tuple[int, int]:
        """The bytes of a row group, unpacked, and its rows, as the file says.

        Raises:
            DataError: They cannot be read.
        """
        answer = self._asked(act="claims", group=group)
        return int(answer["size"]), int(answer["rows"])

    def rows(self, group: int, beside: list[str]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """The rows of a group: bytes of the text, and what lies beside it; None where there is no text.

        Raises:
            DataError: They cannot be decoded.
        """
        asked = self._ask(act="rows", group=group, column=self._about["column"], beside=beside)
        yield from ((content, answer["beside"]) for answer, content in asked if not answer["end"])

    def close(self) -> None:
        """Leave the decoder to the next file, or end it where it is in the middle of an answer."""
        if self._decoder is None or self._decoder.has_ended:
            return
        if self._is_between:
            _IDLE.append(self._decoder)
        else:
            self._decoder.end()

    def _asked(self, **order: Any) -> dict[str, Any]:
        ((answer, _),) = self._ask(**order)
        return answer

    def _ask(self, **order: Any) -> Iterator[Answer]:
        decoder = self._ready(order)
        self._is_between = False
        try:
            yield from decoder.ask(**order)
        except DataError:
            self._ends += decoder.has_ended
            self._is_between = True
            raise
        self._is_between = True

    def _ready(self, order: dict[str, Any]) -> _Decoder:
        """Return a decoder that has the file open, or is to open it."""
        if self._decoder is not None and not self._decoder.has_ended:
            return self._decoder
        if self._ends >= _MOST_ENDS:
            raise DataError(f"not read: the file has ended {_MOST_ENDS} processes that read it")
        decoder = self._decoder = _take()
        if order["act"] != "open":
            list(decoder.ask(act="open", **self._about))
        return decoder


@contextlib.contextmanager
def open_table(path: str, column: str) -> Iterator[ParquetTable]:
    """Open a file in a process that is bounded in memory.

    Args:
        path: Of the file, or its address.
        column: Of the text.
    """
    table = ParquetTable(path, column)
    try:
        yield table
    finally:
        table.close()
