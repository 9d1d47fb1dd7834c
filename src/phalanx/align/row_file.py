"""Rows that a model makes: finished ones are kept whatever ends the process, and the whole file comes at once."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import DataError
from phalanx.telemetry import RowsTold

Make = Callable[[range], Sequence[Mapping[str, Any]]]
"""Makes the rows of a batch, by their numbers."""


class ResumableRows:
    """A file of JSON lines with its lineage.

    Rows gather in ``FILE.unfinished`` behind a line that names their origin. When all are there, ``FILE`` is written,
    and ``FILE.lineage.json`` with the same entries and the digest of ``FILE``.

    Args:
        lineage: All that decides the rows, as JSON: digests, seed, settings.
        batch: Number of rows that are made together.
    """

    def __init__(self, path: Path, lineage: Mapping[str, Any], batch: int) -> None:
        self._path, self._batch = path, batch
        self._lineage: dict[str, Any] = json.loads(json.dumps({**lineage, "batch": batch}))
        self._unfinished = path.with_name(f"{path.name}.unfinished")
        self._about = path.with_name(f"{path.name}.lineage.json")

    def make_all(self, count: int, make: Make, told: RowsTold) -> list[dict[str, Any]]:
        """Return all rows: existing ones, and new ones.

        A batch is always of the same rows, so rows have the same bits wherever an earlier call was interrupted.

        Args:
            make: ``make(range(a, b))`` returns rows a to b - 1.
            told: Called after each batch with the number of finished rows and `count`.

        Raises:
            DataError: What is there was made of something else; or the disk does not take it.
        """
        try:
            rows = self._read_unfinished()
            told(len(rows), count)
            with self._unfinished.open("ab") as stream:
                if not stream.tell():
                    stream.write(canonical_json(self._lineage) + b"\n")
                while len(rows) < count:
                    first = len(rows) // self._batch * self._batch
                    batch = make(range(first, min(first + self._batch, count)))[len(rows) - first :]
                    stream.write(b"".join(canonical_json(row) + b"\n" for row in batch))
                    stream.flush()
                    rows += [dict(row) for row in batch]
                    told(len(rows), count)
        except OSError as exc:
            raise DataError(f"{exc.filename or self._path}: cannot be written ({exc.strerror})") from exc
        return rows

    def finish_file(self, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> dict[str, Any]:
        """Write the file and its lineage, and return the latter."""
        if not rows:
            raise DataError(f"{self._path}: no usable row to write: {json.dumps(figures)}")
        content = b"".join(canonical_json(row) + b"\n" for row in rows)
        sha256 = hashlib.sha256(content).hexdigest()
        lineage = {"made_of": self._lineage, **figures, "rows": len(rows), "sha256": sha256}
        try:
            for path, written in ((self._about, json.dumps(lineage, indent=1).encode() + b"\n"), (self._path, content)):
                spare = path.with_name(f"{path.name}.spare")
                spare.write_bytes(written)
                os.replace(spare, path)
            self._unfinished.unlink()
        except OSError as exc:
            raise DataError(f"{self._path}: cannot be written ({exc.strerror})") from exc
        return lineage

    def read_lineage(self) -> dict[str, Any] | None:
        """Return the lineage of the file where it is whole already; None where it is still to be made."""
        if not self._path.exists():
            return None
        try:
            record = json.loads(self._about.read_bytes())
            content = self._path.read_bytes()
        except (OSError, ValueError, RecursionError) as exc:
            raise DataError(f"{self._path}: already exists without a lineage beside it; give another name") from exc
        made_of = record.get("made_of") if isinstance(record, dict) else None
        if made_of != self._lineage:
            raise self._foreign_error(self._path, made_of)
        if record.get("sha256") != hashlib.sha256(content).hexdigest():
            raise DataError(f"{self._path}: was changed since it was made; give another name, or remove it")
        return dict(record)

    def _read_unfinished(self) -> list[dict[str, Any]]:
        """Return the whole rows of an earlier call; a torn last line is cut off."""
        if not self._unfinished.exists():
            return []
        content = self._unfinished.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            with self._unfinished.open("r+b") as stream:
                stream.truncate(len(complete))
        try:
            objects = [json.loads(text) for text in complete.splitlines()]
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{self._unfinished}: is not an unfinished row file ({exc}); remove it") from exc
        if objects and objects[0] != self._lineage:
            raise self._foreign_error(self._unfinished, objects[0])
        return objects[1:]

    def _foreign_error(self, path: Path, told: object) -> DataError:
        entries = told if isinstance(told, dict) else {}
        other = [f"another value of {name}" for name, value in self._lineage.items() if entries.get(name) != value]
        return DataError(f"{path}: was made with {', '.join(other)}; give another name, or remove it")
