"""Documents that differ from another one in few words."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.data.rules.page import LONGEST_GRAM, Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings, Texts, import_library

_FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
_CACHED_SHINGLES = 1 << 23
"""Of all cached documents together: 64 MiB."""


class NearDuplicatesConfig(RuleSettings):
    """When two documents count as one: a Jaccard similarity of their runs of `shingle` words of at least `similarity`.

    `bands` of `rows` hashes each find the candidates: a pair of similarity s is looked at with a chance of
    1 - (1 - s^rows)^bands, 0.98 at 0.75 with the defaults; more bands find more, more rows look at fewer in vain.
    """

    kind: Literal["near_duplicates"] = "near_duplicates"
    similarity: float = Field(default=0.7, gt=0, le=1)
    shingle: int = Field(default=5, ge=1, le=LONGEST_GRAM)
    bands: int = Field(default=20, ge=1, le=64)
    rows: int = Field(default=6, ge=1, le=32)
    keep: Literal["first", "longest"] = "first"
    seed: int = Field(default=1, ge=0, lt=2**63)


class NearDuplicates:
    """Drops all but one of each group of near duplicates; a group is what verified pairs connect.

    MinHash signatures in bands find candidate pairs: documents with an equal band, each with the first and with the one
    before it of those. A pair counts only after the exact similarity of both texts was computed, so a drop is never a
    matter of chance; a pair that no band finds is missed. Documents with fewer words than a shingle are never near
    duplicates. A mark takes 8 bytes a band and 4, and the decision keeps all of them in memory.

    Source: Broder 1997 (MinHash); Lee et al. 2022, section 4.2; bands as in Penedo et al. 2024.
    """

    def __init__(self, config: NearDuplicatesConfig) -> None:
        self._config = config
        self._minhash: Any = import_library("rensa", config.kind).RMinHash

    def mark_page(self, page: Page) -> bytes:
        """The hash of each band, and the characters of the text; empty for too few words."""
        config = self._config
        shingles = page.plain_grams(config.shingle)
        if not len(shingles):
            return b""
        count = config.bands * config.rows
        offsets = np.array([0, len(shingles)], np.uint64)
        digest = self._minhash.digest_matrix_from_flat_token_hashes(shingles, offsets, count, config.seed)
        rows = np.array(digest.to_rows()[0], np.uint64).reshape(config.bands, config.rows)
        # one hash of each row of a matrix
        mixed = np.zeros(len(rows), np.uint64)
        for column in rows.T:
            mixed = (mixed ^ column) * _FACTOR
            mixed ^= mixed >> np.uint64(32)
        bands = mixed
        return min(len(page.text), 2**32 - 1).to_bytes(4, "little") + bands.tobytes()

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Drop all but one document of each group; the reason names the document that stays."""
        config = self._config
        numbers, sizes, bands = _unpack_marks(marks, config.bands)
        groups = _Groups(len(numbers))
        shingles = _ShingleCache(texts, config.shingle)
        for first, other in _candidate_pairs(bands):
            if groups.find_root(first) == groups.find_root(other):
                continue
            if (
                jaccard_similarity(
                    shingles.get_shingles(int(numbers[first])), shingles.get_shingles(int(numbers[other]))
                )
                >= config.similarity
            ):
                groups.join_members(first, other)
        stays: dict[int, int] = {}
        for members in groups.groups_of_several():
            representative = max(members, key=sizes.__getitem__) if config.keep == "longest" else members[0]
            stays |= {member: representative for member in members if member != representative}
        for dropped in sorted(stays):
            name = texts.read_page(int(numbers[stays[dropped]])).document.name
            yield int(numbers[dropped]), Drop(RuleReason("near_duplicate_of", name, config.similarity))


def jaccard_similarity(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """Share of common elements of two sets, given sorted and without repetitions; two empty ones have none."""
    if not len(one) or not len(other):
        return 0.0
    union = np.concatenate((one, other))
    union.sort(kind="stable")
    common = int(np.count_nonzero(union[1:] == union[:-1]))
    return common / (len(union) - common)


def _unpack_marks(
    marks: Iterable[bytes], bands: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    numbers, sizes, packed = array("q"), array("q"), bytearray()
    for number, mark in enumerate(marks):
        if mark:
            numbers.append(number)
            sizes.append(int.from_bytes(mark[:4], "little"))
            packed += mark[4:]
    matrix = np.frombuffer(packed, np.uint64).reshape(-1, bands)
    return np.array(numbers, np.int64), np.array(sizes, np.int64), matrix


def _candidate_pairs(bands: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Yield each pair of documents with an equal band once, the lower one first, in order.

    Of many documents with the same band, each is paired with the first and with the one before it: the number of pairs
    grows with the documents, not with their square.
    """
    pairs = np.empty(0, np.uint64)
    for column in bands.T:
        order = np.argsort(column, kind="stable")
        values = column[order]
        is_same = np.concatenate(([False], values[1:] == values[:-1]))
        later = np.flatnonzero(is_same)
        begins = np.maximum.accumulate(np.where(is_same, 0, np.arange(len(order))))
        pair_groups = [
            (order[places].astype(np.uint64) << _HALF) | order[later].astype(np.uint64)
            for places in (later - 1, begins[later])
        ]
        pairs = np.unique(np.concatenate((pairs, *pair_groups)))
    for pair in pairs.tolist():
        yield pair >> 32, pair & 0xFFFFFFFF


class _Groups:
    """Documents that pairs connect, each group by its lowest member."""

    def __init__(self, count: int) -> None:
        self._parents = array("q", range(count))

    def find_root(self, member: int) -> int:
        parents = self._parents
        while parents[member] != member:
            parents[member] = parents[parents[member]]
            member = parents[member]
        return member

    def join_members(self, one: int, other: int) -> None:
        low, high = sorted((self.find_root(one), self.find_root(other)))
        self._parents[high] = low

    def groups_of_several(self) -> list[list[int]]:
        """Every group of two and more, members in rising order."""
        members: dict[int, list[int]] = {}
        for member, parent in enumerate(self._parents):
            if parent != member:
                root = self.find_root(member)
                members.setdefault(root, [root]).append(member)
        return list(members.values())


class _ShingleCache:
    """The shingles of documents as sorted arrays; those used last are kept in bounded memory."""

    def __init__(self, texts: Texts, length: int) -> None:
        self._texts, self._length = texts, length
        self._cache: OrderedDict[int, NDArray[np.uint64]] = OrderedDict()
        self._size = 0

    def get_shingles(self, number: int) -> NDArray[np.uint64]:
        shingles = self._cache.pop(number, None)
        if shingles is None:
            shingles = np.unique(self._texts.read_page(number).plain_grams(self._length))
            self._size += len(shingles)
        self._cache[number] = shingles
        while self._size > _CACHED_SHINGLES and len(self._cache) > 1:
            self._size -= len(self._cache.popitem(last=False)[1])
        return shingles
