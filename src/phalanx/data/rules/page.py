"""A document as rules see it: what several of them need of its text is computed once."""

import re
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.data.rules.term_table import TermTable, current_table
from phalanx.data.sources import Document

_BLANK_LINES = re.compile(r"\n{2,}")
_LINE_ENDS = re.compile(r"\n+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number with no pattern (2^64 by the golden ratio): makes the hash of an n-gram depend on its order."""
LONGEST_GRAM = 64


class Page:
    """One document on its way through the rules: every part is made when first asked for, and then shared.

    A *word* stands between white spaces; a *term* is a word without the punctuation around it, or such a punctuation
    mark, as Gopher's and FineWeb's thresholds count. Rules must not change the arrays.
    """

    def __init__(self, document: Document, source: str) -> None:
        self.document, self.source = document, source
        self._grams: dict[int, NDArray[np.uint64]] = {}
        self._plain_grams: dict[int, NDArray[np.uint64]] = {}

    @property
    def text(self) -> str:
        """The text, without a copy."""
        return self.document.text

    @property
    def fields(self) -> Mapping[str, str | int | float]:
        """What is known of it beside its text."""
        return self.document.fields

    @cached_property
    def words(self) -> list[str]:
        """The text split at white space."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """The text split at every kind of line end (``str.splitlines``)."""
        return self.text.splitlines()

    @cached_property
    def filled_lines(self) -> list[str]:
        """The text split at runs of line ends; the first or last is empty where the text begins or ends with one."""
        return _LINE_ENDS.split(self.text.replace("\r\n", "\n"))

    @cached_property
    def paragraphs(self) -> list[str]:
        """The text without white space around it, split at empty lines."""
        return _BLANK_LINES.split(self.text.strip().replace("\r\n", "\n"))

    @cached_property
    def term_table(self) -> TermTable:
        """What is known of its terms; the numbers in `terms` are this table's."""
        return current_table()

    @cached_property
    def terms(self) -> NDArray[np.int64]:
        """Its terms in order, as numbers of `term_table`."""
        return self.term_table.number_terms(self.words)

    @cached_property
    def term_bits(self) -> NDArray[np.uint8]:
        """The classes of each term."""
        return self.term_table.look_up_bits(self.terms)

    @cached_property
    def term_lengths(self) -> NDArray[np.int64]:
        """Characters of each term."""
        return self.term_table.look_up_lengths(self.terms)

    @cached_property
    def term_ends(self) -> NDArray[np.int64]:
        """Characters of all terms before each one, and of all: one more than there are terms."""
        return np.concatenate(([0], np.cumsum(self.term_lengths)))

    def term_grams(self, count: int) -> NDArray[np.uint64]:
        """Hashes of every run of so many terms, by the place of its first."""
        if not self._grams:
            self._grams[1] = self.term_table.look_up_hashes(self.terms)
        return compute_grams(self._grams, count)

    def plain_grams(self, count: int) -> NDArray[np.uint64]:
        """Hashes of every run of so many terms in lower case, punctuation left out: what duplicates are found by."""
        if not self._plain_grams:
            self._plain_grams[1] = self.term_table.plain_hashes(self.terms)
        return compute_grams(self._plain_grams, count)


def compute_grams(known: dict[int, NDArray[np.uint64]], count: int) -> NDArray[np.uint64]:
    """Return the hashes of n-grams, from the longest known shorter ones; all lengths on the way are kept.

    Args:
        known: Hashes by length; those of single terms at least.
        count: Terms of a gram, at most `LONGEST_GRAM`.
    """
    if not 1 <= count <= LONGEST_GRAM:
        raise ValueError(f"n-grams: {count} terms; allowed are 1 to {LONGEST_GRAM}")
    if count not in known:
        start = max(length for length in known if length < count)
        hashes, single = known[start], known[1]
        for length in range(start + 1, count + 1):
            hashes = hashes[: max(0, len(single) - length + 1)] * _FACTOR + single[length - 1 :]
        known[count] = hashes
    return known[count]
