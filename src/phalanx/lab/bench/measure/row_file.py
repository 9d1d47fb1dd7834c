"""Many cells, one after the other; each row is on disk when it is finished, so whatever was interrupted goes on."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from phalanx.config import canonical_json
from phalanx.errors import DataError, writing_cure

Row = dict[str, Any]
Cell = TypeVar("Cell")


class RowFile(Generic[Cell]):
    """Finished rows, one JSON object a line, each with a key over all that decided it."""

    def __init__(
        self,
        path: Path,
        deciding: Callable[[Cell], Sequence[object]],
        holds: Callable[[Cell, Row], bool] = lambda cell, row: True,
    ) -> None:
        """Read what there is.

        Args:
            deciding: Tells, as JSON, all that decides a cell's figures but versions, which are always in the key.
            holds: Whether a row that was found is of what would be measured now, as far as only the row can tell.
        """
        self.path = path
        self._deciding = deciding
        self._holds = holds
        self._rows = {str(row["key"]): row for row in self._read_rows()}

    def find_row(self, cell: Cell) -> Row | None:
        """The row of a cell, None where it is not finished, or something that decides it was otherwise then."""
        row = self._rows.get(self.cell_key(cell))
        return row if row is not None and self._holds(cell, row) else None

    def append_row(self, cell: Cell, row: Row) -> Row:
        """Append a row; it is on disk when this returns."""
        stored_row = {"key": self.cell_key(cell), **row}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._drop_broken_line()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(stored_row, allow_nan=False) + "\n")
        except OSError as exc:
            raise DataError(
                f"{self.path}: cannot be written ({exc.strerror}); {writing_cure(exc)}, with PHALANX_CACHE"
            ) from exc
        self._rows[stored_row["key"]] = stored_row
        return stored_row

    def cell_key(self, cell: Cell) -> str:
        """Digest of the cell and of everything else that decides its figures."""
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")]
        parts = [*self._deciding(cell), versions, platform.python_version()]
        return hashlib.sha256(canonical_json(parts)).hexdigest()

    def _read_rows(self) -> Iterator[Row]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise DataError(f"{self.path}: cannot be read ({exc.strerror}); check its permissions") from exc
        for number, row_line in enumerate(lines, start=1):
            try:
                row = json.loads(row_line)
            except ValueError as exc:
                # a sweep was killed while it wrote
                if not row_line.endswith("\n"):
                    return
                raise DataError(f"{self.path}, line {number}: is not JSON ({exc}); remove the line") from exc
            yield row

    def _drop_broken_line(self) -> None:
        """Cut off an unfinished line of a killed sweep: the next row would become part of it."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


def sweep_cells(
    cells: Iterable[Cell],
    rows: RowFile[Cell],
    make: Callable[[Cell], Row] | None,
    tell: Callable[[str, Cell, Row], None],
) -> Iterator[Row]:
    """Yield the rows of these cells, in order, and make missing rows.

    Args:
        make: Function that makes a missing row; None leaves such rows out.
        tell: Told about each new row, and which of how many it is.
    """
    cell_list = list(cells)
    for number, cell in enumerate(cell_list, start=1):
        row = rows.find_row(cell)
        if row is None and make is not None:
            row = rows.append_row(cell, make(cell))
            tell(f"{number} of {len(cell_list)}", cell, row)
        if row is not None:
            yield row
