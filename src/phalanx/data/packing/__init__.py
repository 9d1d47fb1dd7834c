"""Documents to rows of one length: cut out of all in a row, or put whole where they fit best."""

from phalanx.data.packing.rows import (
    BestFitRows as BestFitRows,
    RowBlock as RowBlock,
    Rows as Rows,
    TokenArray as TokenArray,
    TokenSplit as TokenSplit,
    Windows as Windows,
)
