"""A table where the terminal has room for it, else a list: no name is cut, and no number is broken."""

from collections.abc import Collection, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from phalanx.config import printable

_MAX_CHARACTERS = 10_000


class FittedTable:
    """Rows under heads; where the widest row does not fit, a list with a line for each cell.

    Args:
        heads: Names of the columns; the first one names a row.
        rows: As many cells each. No text in them is read as markup or can steer the terminal.
        title: Stands above.
        left: Heads of columns with words; the others have figures and are set to the right.
        frame: Whether the table has lines around its cells.
        lines: What stands there where the table does not fit; left out, a line for each cell.
    """

    def __init__(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        left: Collection[str] = (),
        frame: bool = True,
        lines: Sequence[str] | None = None,
    ) -> None:
        self._heads = [_text(head) for head in heads]
        self._rows = [[_text(cell) for cell in row] for row in rows]
        self._title, self._frame = _text(title), frame
        self._instead = None if lines is None else [_text(line) for line in lines]
        self._left = {number for number, head in enumerate(heads) if head in left}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the rows out for the width that there is."""
        table = self._table()
        if Measurement.get(console, options.update(width=_MAX_CHARACTERS), table).maximum <= options.max_width:
            yield table
        elif self._instead is not None:
            yield from self._instead
        else:
            yield from self._list()

    def _table(self) -> Table:
        columns = [
            Column(head, justify="left" if number in self._left else "right", no_wrap=True)
            for number, head in enumerate(self._heads)
        ]
        table = Table(*columns, title=self._title if self._title.plain else None)
        if not self._frame:
            table.box, table.pad_edge = None, False
        for row in self._rows:
            table.add_row(*row)
        return table

    def _list(self) -> Iterator[Text | Padding]:
        if self._title.plain:
            yield Text(self._title.plain, style="italic")
        for row in self._rows:
            yield Text(f"{self._heads[0].plain} {row[0].plain}", overflow="fold")
            for head, cell in zip(self._heads[1:], row[1:], strict=True):
                if cell.plain:
                    yield Padding(Text(f"{head.plain}: {cell.plain}", overflow="fold"), (0, 0, 0, 2))


def _text(words: str) -> Text:
    return Text(printable(words, _MAX_CHARACTERS), overflow="fold")
