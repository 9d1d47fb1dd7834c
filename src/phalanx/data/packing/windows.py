"""Sequences cut out of all documents in a row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.data.manifest import count_sequences
from phalanx.data.packing.rows import IGNORED, RowBlock, TokenSplit


class Windows:
    """Windows of one length over a split, one behind the other; a document goes on in the next window.

    Args:
        split: Of which tokens.
        length: Tokens of a sequence; each also needs the token behind it, its last label.
    """

    def __init__(self, split: TokenSplit, length: int) -> None:
        self._split = split
        self._length = length
        self.num_rows, _ = count_sequences(len(split.tokens), length)

    def read(self, numbers: Sequence[int]) -> RowBlock:
        """As `Rows.read`."""
        length, tokens = self._length, self._split.tokens
        rows = np.empty((len(numbers), length + 1), dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = tokens[number * length : (number + 1) * length + 1]
        ids = np.ascontiguousarray(rows[:, :-1])
        ends = ids == self._split.eos_id
        labels = np.where(ends, IGNORED, rows[:, 1:])
        documents = np.zeros_like(ids)
        np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])
        return RowBlock(ids, labels, documents)

    def holding(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `Rows.holding`."""
        behind = min(-(-stop // self._length), self.num_rows) if stop > start else 0
        return np.arange(start // self._length, behind, dtype=np.int64)

    def scores(self, by: str) -> NDArray[np.float64]:
        """As `Rows.scores`."""
        starts, edges = self._split.starts(), np.arange(self.num_rows + 1, dtype=np.int64) * self._length
        # the sum of scores over tokens is linear between two borders of documents
        sums = np.concatenate([[0.0], np.cumsum(self._split.score(by) * np.diff(starts))])
        found: NDArray[np.float64] = np.diff(np.interp(edges, starts, sums)) / self._length
        return found
