"""Documents to rows of one length: put whole where they fit best, or cut out of all in a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.data.manifest import count_sequences
from phalanx.errors import DataError

Tokens = NDArray[np.int64]


class TokenArray(Protocol):
    """All tokens of a split in a row; a memory map, or shards that are verified when they are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> NDArray[np.unsignedinteger]: ...


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split, and where its documents are.

    Attributes:
        tokens: Every document with the end-of-text token behind it.
        starts: Gives where every document begins, and at the end the number of tokens, ``[documents + 1]``.
        field: Gives a number of each document by the name of a field, ``[documents]``.
        weights: Weight of each token in the loss, ``[tokens]``; None where all count alike.
    """

    tokens: TokenArray
    eos_id: int
    starts: Callable[[], NDArray[np.int64]]
    field: Callable[[str], NDArray[np.float64]]
    weights: NDArray[np.float32] | None = None

    def document_scores(self, by: str) -> NDArray[np.float64]:
        """Return a score of each document: its tokens, for "length", its number, for "place", or a field."""
        if by == "place":
            return np.arange(len(self.starts()) - 1, dtype=np.float64)
        return np.diff(self.starts()).astype(np.float64) if by == "length" else self.field(by)


@dataclass(frozen=True)
class RowBlock:
    """Rows as they were read, each of the same number of tokens.

    Attributes:
        ids: int64 ``[rows, length]``.
        labels: int64, the token behind each one; of the end of a document, and of filling, `IGNORED`.
        documents: int64, the number of each token's document within its row, rising from 0; filling is one more.
        weights: float32, of each label; None where all that count do alike.
    """

    ids: Tokens
    labels: Tokens
    documents: Tokens
    weights: NDArray[np.float32] | None = None


IGNORED = -100


class Rows(Protocol):
    """The sequences of one split, by number."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def read_rows(self, numbers: Sequence[int]) -> RowBlock:
        """Read rows by number; the caller has checked that there are such."""

    def rows_holding(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows with any of the split's tokens ``start .. stop - 1`` among their inputs, ascending.

        A document that is a label of a row is also an input of it: no label reaches over a document's end.
        """

    def mean_scores(self, by: str) -> NDArray[np.float64]:
        """Return the mean score of each row's documents, weighed by the tokens that it has of each."""


class Windows:
    """Windows of one length over a split, one behind the other; a document goes on in the next window.

    Args:
        length: Tokens of a sequence; each also needs the token behind it, its last label.
    """

    def __init__(self, split: TokenSplit, length: int) -> None:
        self._split = split
        self._length = length
        self.num_rows, _ = count_sequences(len(split.tokens), length)

    def read_rows(self, numbers: Sequence[int]) -> RowBlock:
        """As `Rows.read_rows`; a document's last token predicts nothing, and `weights` is None."""
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

    def rows_holding(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `Rows.rows_holding`."""
        behind = min(-(-stop // self._length), self.num_rows) if stop > start else 0
        return np.arange(start // self._length, behind, dtype=np.int64)

    def mean_scores(self, by: str) -> NDArray[np.float64]:
        """As `Rows.mean_scores`."""
        starts, edges = self._split.starts(), np.arange(self.num_rows + 1, dtype=np.int64) * self._length
        # the sum of scores over tokens is linear between two borders of documents
        sums = np.concatenate([[0.0], np.cumsum(self._split.document_scores(by) * np.diff(starts))])
        scores: NDArray[np.float64] = np.diff(np.interp(edges, starts, sums)) / self._length
        return scores


class BestFitRows:
    """Rows of whole documents by best-fit decreasing; only a document longer than a row is cut.

    What is left of a row is filled with end-of-text tokens that no loss is taken of. A row's documents stand in it
    longest first.

    Where tokens have weights, a document is whole in its row, and labels are the tokens that have one above 0.

    Args:
        alone: Every piece has a row for itself.

    Source: Johnson 1974 (best-fit decreasing); Ding et al. 2024, Fewer truncations improve language modeling.
    """

    def __init__(self, split: TokenSplit, length: int, *, alone: bool = False) -> None:
        self._split = split
        self._length = length
        self._starts, self._sizes, self._owners = _cut_pieces(split.starts(), length)
        pieces = np.arange(len(self._sizes), dtype=np.int64)
        self._rows = pieces if alone else pack_best_fit(self._sizes, length)
        self.num_rows = int(self._rows.max()) + 1 if len(self._rows) else 0
        # the pieces of each row stand together, longest first
        order = np.lexsort((np.arange(len(self._rows)), -self._sizes, self._rows))
        self._order = order
        self._edges = np.searchsorted(self._rows[order], np.arange(self.num_rows + 1))

    def read_rows(self, numbers: Sequence[int]) -> RowBlock:
        """As `Rows.read_rows`."""
        shape = (len(numbers), self._length)
        ids = np.full(shape, self._split.eos_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int64)
        weights = None if self._split.weights is None else np.zeros(shape, dtype=np.float32)
        for row, number in enumerate(numbers):
            position = 0
            pieces = self._order[self._edges[number] : self._edges[number + 1]]
            for place, piece in enumerate(pieces):
                start, size = int(self._starts[piece]), int(self._sizes[piece])
                # the first token behind the piece is the last label, unless a document ends there
                tokens = self._split.tokens[start : start + size + 1].astype(np.int64)
                ids[row, position : position + size] = tokens[:size]
                after = np.full(size, IGNORED, dtype=np.int64)
                after[: len(tokens) - 1] = tokens[1:]
                if weights is None or self._split.weights is None:
                    counts = tokens[:size] != self._split.eos_id
                else:
                    weights[row, position : position + size - 1] = self._split.weights[start + 1 : start + size]
                    counts = weights[row, position : position + size] > 0
                labels[row, position : position + size] = np.where(counts, after, IGNORED)
                documents[row, position : position + size] = place
                position += size
            documents[row, position:] = len(pieces)
        return RowBlock(ids, labels, documents, weights)

    def rows_holding(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `Rows.rows_holding`."""
        begins, ends = np.maximum(self._starts, start), np.minimum(self._starts + self._sizes, stop)
        return np.unique(self._rows[begins < ends])

    def mean_scores(self, by: str) -> NDArray[np.float64]:
        """As `Rows.mean_scores`."""
        of_pieces = self._split.document_scores(by)[self._owners]
        sums = np.bincount(self._rows, weights=of_pieces * self._sizes, minlength=self.num_rows)
        return sums / np.bincount(self._rows, weights=self._sizes, minlength=self.num_rows)


def pack_best_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the row of each piece by best-fit decreasing.

    Pieces of one size are placed together: the row that fits best still fits best after it took one of them, as long
    as another one fits, so that rows are filled by the handful. The work grows with the number of different sizes
    and of rows, not with that of pieces.

    Args:
        sizes: Size of each piece, 1 to `capacity`.

    Returns:
        int64 ``[pieces]``: row numbers from 0, none left out.
    """
    if len(sizes) and not (sizes.min() >= 1 and sizes.max() <= capacity):
        raise DataError(f"packing: pieces of {sizes.min()} to {sizes.max()} tokens, rows of {capacity}")
    rows = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    distinct, firsts = np.unique(-sizes[order], return_index=True)
    bounds = [*firsts.tolist(), len(sizes)]
    room = _FreeRows(capacity)
    for size, start, stop in zip((-distinct).tolist(), bounds, bounds[1:], strict=False):
        position = start
        while position < stop:
            free = room.find_room(size)
            rows_per_bin = free // size
            taken = room.take_rows(free, -(-(stop - position) // rows_per_bin))
            placed = min(stop - position, rows_per_bin * len(taken))
            rows[order[position : position + placed]] = np.repeat(taken, rows_per_bin)[:placed]
            position += placed
            last = placed - rows_per_bin * (len(taken) - 1)
            room.return_rows(free - rows_per_bin * size, taken[:-1])
            room.return_rows(free - last * size, taken[-1:])
    return rows


class _FreeRows:
    """Rows by the room that is left in them; a bit for each room that some row has finds the best one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: list[list[NDArray[np.int64]]] = [[] for _ in range(capacity + 1)]
        self._room_bits = 0
        self._num_rows = 0

    def find_room(self, size: int) -> int:
        """Return the least room that holds a piece; a new row's where none does."""
        fitting = self._room_bits >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else self._capacity

    def take_rows(self, free: int, wanted: int) -> NDArray[np.int64]:
        """Take up to so many rows with so much room; new ones, as many as are wanted, where there is none."""
        if not self._room_bits >> free & 1:
            self._num_rows += wanted
            return np.arange(self._num_rows - wanted, self._num_rows, dtype=np.int64)
        rows = self._rows[free].pop()
        self.return_rows(free, rows[wanted:])
        if not self._rows[free]:
            self._room_bits &= ~(1 << free)
        return rows[:wanted]

    def return_rows(self, free: int, rows: NDArray[np.int64]) -> None:
        """Put rows back with so much room."""
        if len(rows) and free:
            self._rows[free].append(rows)
            self._room_bits |= 1 << free


def _cut_pieces(
    starts: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents that are longer than a row: where each piece starts, its size, and its document."""
    sizes = np.diff(starts)
    counts = -(-sizes // length)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    within = np.arange(len(owners), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = starts[:-1][owners] + within * length
    return begins, np.minimum(length, starts[1:][owners] - begins), owners
