"""What is known of every term that this process has met: a document is then an array of numbers.

A piece of text between white spaces is split into terms once in the life of a process, and length, hash and character
classes of a term are found once. What remains for each document is one look-up a piece; all statistics are arithmetic
on arrays. Numbers of terms differ between processes and mean nothing outside: what leaves a rule is made of hashes,
lengths and classes, which depend on the text alone.
"""

import string
import threading
import unicodedata
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.rules.term_split import split_piece

SYMBOL, ALPHABETIC, PLAIN = 1, 2, 4
"""Bits of a term: punctuation and controls alone; holds a letter; holds a letter or a digit."""
SENTENCE_END, PUNCTUATION, OTHER = b"E"[0], b"P"[0], b"W"[0]
"""Kinds of a term for counting sentences."""

_SENTENCE_END_RANGES = """
0021 002E 003F 0589 061D-061F 06D4 0700-0702 07F9 0837 0839 083D-083E 0964-0965 104A-104B 1362 1367-1368 166E
1735-1736 17D4-17D5 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D
2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F
AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1
11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7
11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F
16AF5 16B37-16B38 16B44 16E98 1BC9F 1DA88
"""


def _character_set(ranges: str) -> frozenset[str]:
    borders = [[int(code, 16) for code in border.split("-")] for border in ranges.split()]
    return frozenset(chr(code) for border in borders for code in range(border[0], border[-1] + 1))


SENTENCE_ENDS = _character_set(_SENTENCE_END_RANGES)
"""Characters that end a sentence in any script (Unicode property Sentence_Terminal)."""
SYMBOLS = (
    frozenset(string.punctuation)
    | SENTENCE_ENDS
    | frozenset("—–…“”„’«»´、。〈〉《》【】「」％（），．１：；？！～━∶►")
    | frozenset(map(chr, (*range(9), *range(11, 32), *range(127, 160))))
)
"""Characters that make no word by themselves, as the public pipelines count."""

_MAX_CHARACTERS = 1 << 22
"""Of all pieces together, some 150 MB with what belongs to them; then a new table begins."""


Number = TypeVar("Number", bound=np.generic)


class _Pieces(dict[str, int]):
    """The number of a piece; a piece that was never met is split and gets the next one."""

    def __init__(self, table: "TermTable") -> None:
        super().__init__()
        self._table = table

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        self._table.add_piece(piece)
        return number


class TermTable:
    """Pieces and terms by number, with what rules ask of them."""

    def __init__(self) -> None:
        self._pieces, self._terms = _Pieces(self), dict[str, int]()
        self._starts, self._counts, self._members = array("q"), array("q"), array("q")
        self._lengths, self._bits, self._kinds = array("q"), array("B"), array("B")
        self._hashes, self._plain_hashes = array("Q"), array("Q")
        self.characters = 0

    def add_piece(self, piece: str) -> None:
        """Split a piece that is met for the first time."""
        terms = split_piece(piece)
        self.characters += len(piece)
        self._starts.append(len(self._members))
        self._counts.append(len(terms))
        for term in terms:
            number = self._terms.get(term)
            if number is None:
                number = self._terms[term] = len(self._terms)
                self._add_term(term)
            self._members.append(number)

    def _add_term(self, term: str) -> None:
        is_symbol, is_alphabetic = SYMBOLS.issuperset(term), any(map(str.isalpha, term))
        is_plain = is_alphabetic or any(map(str.isalnum, term))
        self._lengths.append(len(term))
        self._bits.append(SYMBOL * is_symbol + ALPHABETIC * is_alphabetic + PLAIN * is_plain)
        self._kinds.append(_sentence_kind(term))
        self._hashes.append(hash_term(term))
        self._plain_hashes.append(hash_term(term.lower()))

    def number_terms(self, pieces: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of all terms of these pieces, in order."""
        of_pieces = np.fromiter(map(self._pieces.__getitem__, pieces), np.int64, len(pieces))
        starts, counts = _array_view(self._starts, np.int64)[of_pieces], _array_view(self._counts, np.int64)[of_pieces]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        if total == len(pieces):
            return _array_view(self._members, np.int64)[starts]
        # a piece of several terms takes as many places, each one further than the one before
        indices = np.repeat(starts - ends + counts, counts) + np.arange(total)
        return _array_view(self._members, np.int64)[indices]

    def look_up_lengths(self, terms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Characters of each."""
        return _array_view(self._lengths, np.int64)[terms]

    def look_up_bits(self, terms: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Classes of each: `SYMBOL`, `ALPHABETIC`, `PLAIN`."""
        return _array_view(self._bits, np.uint8)[terms]

    def look_up_kinds(self, terms: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What each is in a sentence."""
        return _array_view(self._kinds, np.uint8)[terms]

    def look_up_hashes(self, terms: NDArray[np.int64]) -> NDArray[np.uint64]:
        """64 bits of each."""
        return _array_view(self._hashes, np.uint64)[terms]

    def plain_hashes(self, terms: NDArray[np.int64]) -> NDArray[np.uint64]:
        """64 bits of each in lower case; terms without a letter or digit are left out."""
        return _array_view(self._plain_hashes, np.uint64)[terms[(self.look_up_bits(terms) & PLAIN) > 0]]


def _array_view(values: "array[int]", dtype: type[Number]) -> NDArray[Number]:
    """Show an array without a copy; it must not grow while the view lives."""
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)


def _sentence_kind(term: str) -> int:
    if term in SENTENCE_ENDS:
        return SENTENCE_END
    return PUNCTUATION if all(unicodedata.category(char)[0] == "P" for char in term) else OTHER


def hash_term(term: str) -> int:
    """64 bits of a term, the same in every process."""
    # a lone surrogate can come out of an escape in JSON; it must not end a build
    return int.from_bytes(blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class _ThreadTable(threading.local):
    """One table a thread: it is not locked."""

    def __init__(self) -> None:
        self.table = TermTable()


_of_thread = _ThreadTable()


def current_table() -> TermTable:
    """Return the table of this thread; a page keeps the table that it began with."""
    if _of_thread.table.characters > _MAX_CHARACTERS:
        _of_thread.table = TermTable()
    return _of_thread.table


def replace_table(table: TermTable) -> TermTable:
    """Let this thread go on with another table and return the former one: measurements must not share one."""
    before, _of_thread.table = _of_thread.table, table
    return before
