"""Rewriting of packed rows by objectives of pre-training: random draws, and facts about the tokenizer."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError
from phalanx.objectives.causal_lm import IGNORE

_BITS = 53
"""Of a fraction; a double holds as many."""


class Draw:
    """A stream of random numbers for one sample.

    Only raw bits of a counter-based generator are used: numpy keeps these the same for ever, but not the numbers that
    it derives from them.

    Args:
        words: The seed, the number of the sample and whatever else tells streams apart.
    """

    def __init__(self, *words: object) -> None:
        raw = hashlib.sha256("\x1f".join(("phalanx rows", *map(str, words))).encode()).digest()
        self._bits = np.random.Philox(key=np.frombuffer(raw[:16], dtype="<u8").astype(np.uint64))

    def draw_fractions(self, count: int) -> NDArray[np.float64]:
        """Return numbers from 0 to below 1, ``[count]``."""
        raw = np.asarray(self._bits.random_raw(count), dtype=np.uint64)
        return (raw >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS

    def draw_below(self, size: int, count: int) -> NDArray[np.int64]:
        """Return whole numbers from 0 to below `size`, ``[count]``."""
        # the product can round up to `size` itself for sizes above 2**53 alone
        return (self.draw_fractions(count) * size).astype(np.int64)

    def draw_order(self, size: int) -> NDArray[np.int64]:
        """Return ``0 .. size - 1`` in a random order."""
        return np.argsort(self.draw_fractions(size), kind="stable").astype(np.int64)


Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class TokenTable:
    """Facts about a tokenizer's tokens.

    Attributes:
        named: Ids by the text of a token.
        special: Whether no text can give the id, bool ``[vocabulary]``.
        begins_word: Whether a word begins at the id, bool ``[vocabulary]``; None where tokens do not show it.
    """

    named: Mapping[str, int]
    eos_id: int
    special: NDArray[np.bool_]
    begins_word: NDArray[np.bool_] | None = None
    path: str = "data.tokenizer"

    def id_of(self, token: str, key: str) -> int:
        """Return the id of a token that an objective needs."""
        if token not in self.named:
            raise ConfigError(
                f"{key} = {token!r}: the tokenizer ({self.path}) has no such token; name one that it has, or take a "
                "tokenizer with it: data.tokenizer.special_tokens adds some to one that is trained here"
            ).with_facts(code="PHX-C024", key=key, found=token)
        return self.named[token]

    @property
    def ordinary_ids(self) -> Tokens:
        """Every id that a text can give."""
        return np.flatnonzero(~self.special).astype(np.int64)


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    Attributes:
        ids: int64 ``[seq]``.
        labels: int64 ``[seq]``; `IGNORE` where no loss is taken.
        prefix: Number of tokens at the beginning that all tokens see, where attention has prefixes.
    """

    ids: Tokens
    labels: Tokens
    prefix: int = 0


@dataclass(frozen=True)
class RowPlace:
    """The place of a row in a run.

    Attributes:
        sample: Its number: in the run, or among the held-out rows.
        phase: The number of its phase in ``data.phases``.
        held_out: Whether the row is measured on, and never trained on.
    """

    sample: int
    phase: int = 0
    seed: int = 0
    held_out: bool = False

    def random_draw(self, *words: object) -> Draw:
        """Return the random numbers of the row; `words` tell several streams apart."""
        return Draw("held-out" if self.held_out else "train", self.seed, self.sample, *words)


RowRewriting = Callable[[Row, RowPlace], Row]
"""A pure function from a packed row and its place to the row that is learned, of the same length."""


def text_of(row: Row, eos_id: int) -> Tokens:
    """Return the tokens of a packed row: with the last label where it is one, and without the filling behind them."""
    ids = row.ids if row.labels[-1] == IGNORE else np.append(row.ids, row.labels[-1])
    ends = int(np.flatnonzero(ids != eos_id).max(initial=-1)) + 1
    # one end of text belongs to the last document, more are filling
    return ids[: ends + 1]


def fitted_row(tokens: Tokens, length: int, eos_id: int, *, prefix: int = 0, has_borders: bool = True) -> Row:
    """Return tokens as a row of so many inputs, each with the token behind it as its label.

    A longer row is cut off, a shorter one is filled. No loss is taken inside the prefix or in the filling.

    Args:
        eos_id: Id that fills a short row.
        prefix: Its last token is the first that has a label.
        has_borders: Whether no loss is taken behind the end of a document either.
    """
    padded = np.full(length + 1, eos_id, dtype=np.int64)
    num_used = min(len(tokens), length + 1)
    padded[:num_used] = tokens[:num_used]
    labels = padded[1:].copy()
    if has_borders:
        labels[padded[:-1] == eos_id] = IGNORE
    labels[max(num_used - 1, 0) :] = IGNORE
    labels[: max(prefix - 1, 0)] = IGNORE
    return Row(padded[:-1].copy(), labels, prefix)


@dataclass(frozen=True)
class UnchangedRows:
    """A rewriting that leaves rows as they were packed: next-token prediction."""

    def __call__(self, row: Row, place: RowPlace) -> Row:
        """Return the row that is learned."""
        return row
