"""Documents to rows of one length: cut out of all in a row, or put whole where they fit best."""

from phalanx.data.packing.rows import (
    IGNORED,
    BestFitRows,
    RowBlock,
    Rows,
    TokenArray,
    TokenSplit,
    Windows,
    pack_best_fit,
)

__all__ = ["IGNORED", "BestFitRows", "RowBlock", "Rows", "TokenArray", "TokenSplit", "Windows", "pack_best_fit"]
