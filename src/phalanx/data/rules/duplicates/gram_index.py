"""Where runs of bytes stood first: a sample of all grams of a corpus, small enough to be kept in memory."""

import bisect
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phalanx.data.rules.rule import Texts

_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def sampled_grams(text: NDArray[np.uint8], length: int, window: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return places and hashes of some grams of a text: of `window` neighbours at least one, by content alone.

    Two equal runs of ``length + window - 1`` bytes therefore have a gram in common that is in both samples.

    Source: Schleimer, Wilkerson, Aiken 2003 (winnowing), without its rule for ties: all of the smallest are taken.
    """
    count = len(text) - length + 1
    if count < 1:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    powers, inverse = _power_tables(len(text) + 1)
    sums = np.zeros(len(text) + 1, np.uint64)
    np.cumsum(text * inverse[: len(text)], out=sums[1:])
    hashes = (sums[length:] - sums[:count]) * powers[:count]
    # high bits depend on all bytes of a gram, low ones on their sums alone
    hashes ^= hashes >> _HALF
    hashes *= _MIX
    ranks = (hashes >> _HALF).astype(np.uint32)
    places = np.flatnonzero(ranks == _smallest_around(ranks, window))
    return places, hashes[places]


def _smallest_around(ranks: NDArray[np.uint32], window: int) -> NDArray[np.uint32]:
    """Return for each place the largest of the minima of its windows: a place with that value is the minimum of one."""
    window = min(window, len(ranks))
    edge = np.zeros(window - 1, np.uint32)
    return _sliding_best(np.concatenate((edge, _sliding_best(ranks, window, np.minimum), edge)), window, np.maximum)


def _sliding_best(values: NDArray[np.uint32], window: int, best: np.ufunc) -> NDArray[np.uint32]:
    """Return the best of each `window` neighbours, by doubling."""
    reach = 1
    while reach < window:
        step = min(reach, window - reach)
        values = best(values[:-step], values[step:])
        reach += step
    return values


@lru_cache(maxsize=1)
def _power_tables(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the first powers of an odd number and of its inverse, modulo 2^64."""
    inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
    powers, inverses = (np.full(count, base, np.uint64) for base in (_BASE, inverse))
    powers[0] = inverses[0] = 1
    return np.cumprod(powers), np.cumprod(inverses)


class GramIndex:
    """The first place of each sampled gram of all texts so far: 16 bytes each, in sorted tables of doubling size."""

    def __init__(self) -> None:
        self._tables: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []

    def add_grams(self, hashes: NDArray[np.uint64], places: NDArray[np.int64]) -> None:
        """Take up the grams of a text that is behind all others; of equal ones the first place counts."""
        if not len(hashes):
            return
        table = _first_places(hashes, places)
        while self._tables and len(self._tables[-1][0]) <= 2 * len(table[0]):
            before = self._tables.pop()
            table = _first_places(np.concatenate((before[0], table[0])), np.concatenate((before[1], table[1])))
        self._tables.append(table)

    def find_places(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the first place of each gram; -1 of one that is not there."""
        numbers = np.full(len(hashes), -1, np.int64)
        # earlier texts are in earlier tables, and are looked up last
        for table_hashes, places in reversed(self._tables):
            positions = np.minimum(np.searchsorted(table_hashes, hashes), len(table_hashes) - 1)
            is_there = table_hashes[positions] == hashes
            numbers[is_there] = places[positions[is_there]]
        return numbers


def _first_places(
    hashes: NDArray[np.uint64], places: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Sort by hash, and keep the first of equal ones; `places` rise."""
    unique_hashes, first = np.unique(hashes, return_index=True)
    return unique_hashes, places[first]


class EarlierTexts:
    """Finds runs of bytes that stood in an earlier shard of documents, and compares each with the text it stood in."""

    def __init__(self, texts: Texts, least: int) -> None:
        """Begin with no text.

        Args:
            least: Bytes of a run; one of half as many again is found, a shorter one where its gram is in the sample.
        """
        self._min_bytes, self._window = least, max(1, least // 2)
        self._index = GramIndex()
        self._numbers, self._starts, self._size = array("q"), array("q"), 0
        self._read = lru_cache(maxsize=8)(
            lambda number: np.frombuffer(texts.read_page(number).text.encode("utf-8", "replace"), np.uint8)
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no earlier text."""
        return not self._size

    def mark_and_add(
        self, text: NDArray[np.uint8], ends: NDArray[np.int64], numbers: Sequence[int], repeated: NDArray[np.bool_]
    ) -> None:
        """Mark what stood before in a shard's text, and take the text up.

        Args:
            text: Each document with a byte behind it that is in none.
            repeated: Is set for each byte of a run that stood before.
        """
        begins = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
        places, hashes = sampled_grams(text, self._min_bytes, self._window)
        of = np.searchsorted(ends, places)
        is_inside = places + self._min_bytes <= ends[of]
        places, hashes, of = places[is_inside], hashes[is_inside], of[is_inside]
        matches = self._index.find_places(hashes)
        covered = 0
        for match in np.flatnonzero(matches >= 0).tolist():
            place = int(places[match])
            if place + self._min_bytes > covered:
                begin, text_stop = int(begins[of[match]]), int(ends[of[match]])
                first, stop = self._equal_run(text[begin:text_stop], place - begin, int(matches[match]))
                repeated[begin + first : begin + stop] = True
                covered = max(covered, begin + stop)
        self._index.add_grams(hashes, places + self._size)
        self._numbers.extend(numbers)
        self._starts.extend((begins + self._size).tolist())
        self._size += len(text)

    def _equal_run(self, text: NDArray[np.uint8], place: int, before: int) -> tuple[int, int]:
        """Return the run around a place that is equal to the one around an earlier place; empty where there is none."""
        document = bisect.bisect_right(self._starts, before) - 1
        earlier, offset = self._read(self._numbers[document]), before - self._starts[document]
        behind = _common_prefix(text[place:], earlier[offset:])
        if behind < self._min_bytes:
            # two grams with one hash
            return place, place
        return place - _common_prefix(text[:place][::-1], earlier[:offset][::-1]), place + behind


def _common_prefix(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """Return how many bytes two texts have in common from their beginning on."""
    size, done, step = min(len(one), len(other)), 0, 256
    while done < size:
        stop = min(size, done + step)
        differs = one[done:stop] != other[done:stop]
        if differs.any():
            return done + int(differs.argmax())
        done, step = stop, 2 * step
    return size
