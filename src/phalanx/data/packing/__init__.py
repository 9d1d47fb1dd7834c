"""Documents to rows of one length: cut out of all in a row, or put whole where they fit best."""

from phalanx.data.packing.best_fit import BestFitRows, pack_best_fit
from phalanx.data.packing.rows import IGNORED, RowBlock, Rows, TokenArray, TokenSplit
from phalanx.data.packing.windows import Windows

__all__ = ["IGNORED", "BestFitRows", "RowBlock", "Rows", "TokenArray", "TokenSplit", "Windows", "pack_best_fit"]
