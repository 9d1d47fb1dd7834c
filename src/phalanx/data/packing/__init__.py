"""Documents to rows of one length: cut out of all in a row, or put whole where they fit best."""

from phalanx.data.packing.rows import (
    BestFitRows,
    RowBlock,
    Rows,
    TokenArray,
    TokenSplit,
    Windows,
)

__all__ = ["BestFitRows", "RowBlock", "Rows", "TokenArray", "TokenSplit", "Windows"]
