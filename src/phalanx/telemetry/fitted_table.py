"""A table where the terminal has room for it, else a list: no name is cut, and no figure is broken."""

from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from phalanx.config import printable_text

_MAX_CHARACTERS = 10_000
_INDENT, _GAP = 2, "  "


class FittedTable:
    """Rows under heads; where the widest row does not fit, without lines around cells, and else as a list.

    Args:
        heads: Names of the columns; the first one names a row.
        rows: As many cells each. No text in them is read as markup or can steer the terminal.
        left: Heads of columns with words; the others have figures and are set to the right.
        lines: The list where the table does not fit, with two spaces between parts that are not to be broken; left out,
            each row's first cell, and below it the others.
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
        self._heads = [_fold_text(head) for head in heads]
        self._rows = [[_fold_text(cell) for cell in row] for row in rows]
        self._title, self._frame = _fold_text(title), frame
        self._instead = None if lines is None else [_fold_text(line) for line in lines]
        self._left = {number for number, head in enumerate(heads) if head in left}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the rows out for the width that there is."""
        for table in (self._rich_table(frame=frame) for frame in (self._frame, False)):
            if Measurement.get(console, options.update(width=_MAX_CHARACTERS), table).maximum <= options.max_width:
                yield table
                return
        if self._instead is None:
            yield from self._list_rows(options.max_width)
            return
        for line in self._instead:
            first, *others = _pack_parts(line.plain.split(_GAP), options.max_width - _INDENT)
            yield Text(first, overflow="fold")
            yield from (Padding(Text(part, overflow="fold"), (0, 0, 0, _INDENT), expand=False) for part in others)

    def _rich_table(self, *, frame: bool) -> Table:
        columns = [
            Column(head, justify="left" if number in self._left else "right", no_wrap=True)
            for number, head in enumerate(self._heads)
        ]
        table = Table(*columns, title=self._title if self._title.plain else None)
        if not frame:
            table.box, table.pad_edge = None, False
            # a table that was to have a frame has no room to spare
            table.collapse_padding = self._frame
        for row in self._rows:
            table.add_row(*row)
        return table

    def _list_rows(self, width: int) -> Iterator[Text | Padding]:
        if self._title.plain:
            yield Text(self._title.plain, style="italic")
        for row in self._rows:
            yield Text(f"{self._heads[0].plain} {row[0].plain}", overflow="fold")
            cells = [
                f"{head.plain}: {cell.plain}" for head, cell in zip(self._heads[1:], row[1:], strict=True) if cell.plain
            ]
            for row_text in _pack_parts(cells, width - _INDENT):
                yield Padding(Text(row_text, overflow="fold"), (0, 0, 0, _INDENT), expand=False)


def _pack_parts(parts: Sequence[str], width: int) -> list[str]:
    """Put as many parts into each line as it has room for; none is broken by this."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + len(_GAP) + cell_len(part) <= width:
            lines[-1] += f"{_GAP}{part}"
        else:
            lines.append(part)
    return lines


def _fold_text(words: str) -> Text:
    return Text(printable_text(words, _MAX_CHARACTERS), overflow="fold")
