"""``metrics.jsonl``: one JSON object a step, one line each, never rewritten except on resume."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from phalanx.closing import Closeable
from phalanx.errors import InputError, writing_cure


class MetricsFile(Closeable):
    """The metrics of one run, appended a line a step and flushed at once.

    A crash can leave half a line at the end; the next append drops it first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: IO[str] | None = None

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Write one line and flush it.

        Args:
            record: JSON data with an integer ``step``. A number that JSON cannot hold (NaN, infinity)
                is written as null and its name is added to the list ``non_finite``.
        """
        if not _is_step(record.get("step")):
            raise InputError(f"{self.path}: step is {record.get('step')!r}; a record needs an integer step")
        lost: list[str] = []
        clean = _without_non_finite(dict(record), "", lost)
        if lost:
            clean["non_finite"] = lost
        try:
            row = json.dumps(clean, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise InputError(f"{self.path}: step {record['step']} is not JSON data: {exc}") from exc
        try:
            stream = self._open_file()
            stream.write(row + "\n")
            stream.flush()
        except OSError as exc:
            raise InputError(f"{self.path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc

    @property
    def next_step(self) -> int:
        """The step after the last one that has a line; 0 where none has."""
        return max((record["step"] for record in read_metrics(self.path)), default=-1) + 1 if self.path.exists() else 0

    def truncate_after(self, step: int) -> None:
        """Drop every line of a later step, and half a line at the end; the file is replaced atomically.

        Args:
            step: The step that a resumed run starts from; its own line stays.
        """
        self.close()
        if not self.path.exists():
            return
        records = [record for record in read_metrics(self.path) if record["step"] <= step]
        spare = self.path.with_name(self.path.name + ".tmp")
        try:
            with spare.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record) + "\n" for record in records)
                stream.flush()
                os.fsync(stream.fileno())
            spare.replace(self.path)
        except OSError as exc:
            raise InputError(f"{self.path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open_file(self) -> IO[str]:
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                _drop_half_line(self.path)
            self._stream = self.path.open("a", encoding="utf-8")
        return self._stream


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; half a line at the end (a crash while writing) is left out."""
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror})") from exc
    records = []
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(text)
        except ValueError as exc:
            raise InputError(f"{path}:{number}: is not JSON ({exc}); remove the line") from exc
        if not isinstance(record, dict) or not _is_step(record.get("step")):
            raise InputError(f"{path}:{number}: expected an object with an integer step; remove the line")
        records.append(record)
    return records


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _without_non_finite(value: Any, name: str, lost: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(name)
        return None
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        return {key: _without_non_finite(item, f"{prefix}{key}", lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item, f"{name}[{i}]", lost) for i, item in enumerate(value)]
    return value


def _drop_half_line(path: Path) -> None:
    """Cut what follows the last line end; only the tail is read, since metrics files grow long."""
    with path.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        position = size
        while position > 0:
            start = max(0, position - 4096)
            stream.seek(start)
            cut = stream.read(position - start).rfind(b"\n")
            if cut >= 0:
                if start + cut + 1 < size:
                    stream.truncate(start + cut + 1)
                return
            position = start
        stream.truncate(0)
