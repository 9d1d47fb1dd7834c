"""What both packings give: rows of one length, the documents in them, and a score of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
        eos_id: That token.
        starts: Gives where every document begins, and at the end the number of tokens, ``[documents + 1]``.
        field: Gives a number of each document by the name of a field, ``[documents]``.
        weights: How much each token counts as one to be learned, ``[tokens]``; None where all do alike.
    """

    tokens: TokenArray
    eos_id: int
    starts: Callable[[], NDArray[np.int64]]
    field: Callable[[str], NDArray[np.float64]]
    weights: NDArray[np.float32] | None = None

    def score(self, by: str) -> NDArray[np.float64]:
        """Return a score of each document: its tokens, for "length", or a field."""
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
        ...

    def read(self, numbers: Sequence[int]) -> RowBlock:
        """Read rows by number; the caller has checked that there are such."""
        ...

    def holding(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows with any of the split's tokens ``start .. stop - 1`` among their inputs, ascending.

        A document that is a label of a row is also an input of it: no label reaches over a document's end.
        """
        ...

    def scores(self, by: str) -> NDArray[np.float64]:
        """Return the mean score of each row's documents, weighed by the tokens that it has of each."""
        ...
