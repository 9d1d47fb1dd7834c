"""Long runs of characters that occur twice, wherever they begin."""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.data.rules.duplicates.gram_index import EarlierTexts
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Edit, Outcome, RuleReason, RuleSettings, Texts, import_library

_SEPARATOR = b"\xff"
"""Behind each document: a byte that no UTF-8 has."""


class RepeatedSubstringsConfig(RuleSettings):
    """How long a repetition must be, and how much text is compared at once.

    Memory is some 40 times `shard_mib`, and a third of all texts where they are more than one shard.
    """

    kind: Literal["repeated_substrings"] = "repeated_substrings"
    min_bytes: int = Field(default=200, ge=20, alias="least_bytes")
    shard_mib: float = Field(default=16.0, gt=0, le=512)


class RepeatedSubstrings:
    """Cuts every run of at least `min_bytes` bytes that occurred before; the first occurrence stays.

    Shards are filled in the order of documents. Within one a suffix array finds repetitions at any place, also inside
    of a document. What stood in an earlier shard is found by a sample of grams and then compared byte by byte: each
    run of one and a half times `min_bytes` is found, a shorter one by chance. A document larger than a shard is
    left as it is. Characters are cut whole.

    Source: Lee et al. 2022, section 4.1 (ExactSubstr; 50 tokens there, about 200 bytes of English).
    """

    def __init__(self, config: RepeatedSubstringsConfig) -> None:
        self._config = config
        self._suffixes = import_library("pydivsufsort", config.kind)

    def mark_page(self, page: Page) -> bytes:
        """The size of the text in bytes."""
        text = page.text
        size = len(text) if text.isascii() else len(_encode_text(text))
        return size.to_bytes(8, "little")

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Cut repetitions shard by shard."""
        earlier = EarlierTexts(texts, self._config.min_bytes)
        for numbers, following in pairwise(chain(self._group_shards(marks), ([],))):
            yield from self._cut_shard(numbers, texts, earlier, is_last=not following)

    def _group_shards(self, marks: Iterable[bytes]) -> Iterator[list[int]]:
        limit = int(self._config.shard_mib * 2**20)
        shard: list[int] = []
        filled = 0
        for number, mark in enumerate(marks):
            size = int.from_bytes(mark, "little") + len(_SEPARATOR)
            if size > limit or size < self._config.min_bytes:
                continue
            if filled + size > limit:
                yield shard
                shard, filled = [], 0
            shard.append(number)
            filled += size
        if shard:
            yield shard

    def _cut_shard(
        self, numbers: list[int], texts: Texts, earlier: EarlierTexts, *, is_last: bool
    ) -> Iterator[tuple[int, Outcome]]:
        joined = bytearray()
        begins: list[int] = []
        for number in numbers:
            begins.append(len(joined))
            joined += _encode_text(texts.read_page(number).text) + _SEPARATOR
        text = np.frombuffer(joined, np.uint8)
        is_short = len(text) < 2 * self._config.min_bytes
        repeated = np.zeros(len(text), bool) if is_short else self._mark_repeated(text)
        if not is_last or not earlier.is_empty:
            ends = np.array([*begins[1:], len(text)], np.int64) - len(_SEPARATOR)
            earlier.mark_and_add(text, ends, numbers, repeated)
        for number, begin, stop in zip(numbers, begins, [*begins[1:], len(joined)], strict=True):
            here = slice(begin, stop - len(_SEPARATOR))
            if repeated[here].any():
                yield number, _cut_marked(bytes(joined[here]), repeated[here])

    def _mark_repeated(self, text: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Tell of each byte whether it lies in a long enough run that occurred before."""
        least, size = self._config.min_bytes, len(text)
        suffixes = np.asarray(self._suffixes.divsufsort(text), np.int32)
        common = np.asarray(self._suffixes.kasai(text, suffixes), np.int32)[: size - 1]
        room = _bytes_to_end(text)[suffixes]
        # neighbours in the suffix array that share enough, within their documents, are runs of one repeated text
        shares = np.minimum(np.minimum(common, room[:-1]), room[1:]) >= least
        is_first = np.concatenate((shares, [False]))
        is_first[1:] &= ~shares
        in_run = np.concatenate((shares, [False]))
        in_run[1:] |= shares
        places = suffixes[in_run]
        if not len(places):
            return np.zeros(size, bool)
        begins = np.flatnonzero(is_first[in_run])
        earliest = np.repeat(np.minimum.reduceat(places, begins), np.diff(begins, append=len(places)))
        is_later = places != earliest
        # where a text repeats itself without a gap, its first occurrence stays whole
        starts = np.maximum(places, earliest + least)[is_later]
        ends = places[is_later] + least
        return np.cumsum(np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1))[:-1] > 0


def _bytes_to_end(text: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Bytes from each place to the end of its document."""
    ends = np.flatnonzero(text == _SEPARATOR[0]).astype(np.int32)
    rooms: NDArray[np.int32] = np.repeat(ends, np.diff(ends, prepend=-1))
    rooms -= np.arange(len(text), dtype=np.int32)
    return rooms


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _cut_marked(text: bytes, is_cut: NDArray[np.bool_]) -> Outcome:
    """Cut out the marked parts, whole characters only."""
    borders = np.flatnonzero(np.diff(np.concatenate(([False], is_cut, [False])).astype(np.int8))).tolist()
    pieces: list[bytes] = []
    position = places = cut = 0
    for begin, border_end in zip(borders[::2], borders[1::2], strict=True):
        first, stop = _next_character(text, begin), _last_character(text, border_end)
        if first < stop:
            pieces.append(text[position:first])
            position, places, cut = stop, places + 1, cut + stop - first
    pieces.append(text[position:])
    if not places:
        return None
    edited = b"".join(pieces).decode()
    reason = RuleReason("repeated_bytes", cut)
    return Edit(edited, places, reason) if edited.strip() else Drop(reason)


def _next_character(text: bytes, place: int) -> int:
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place


def _last_character(text: bytes, place: int) -> int:
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place
