"""The words of a whole corpus as numbers, on disk: written once, read as often as a scan needs."""

import re
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.closing import Closeable
from phalanx.data.rules.rule import Drop, Outcome, Quarantine, RuleReason, RuleSettings, Tag

Words = npt.NDArray[np.uint32]
Grams = npt.NDArray[np.uint64]

WORD = re.compile(r"\w+|[^\w\s]")
"""A word, or one mark between words: a trigger often stands in brackets, and what follows it sticks to them."""

_MAX_KNOWN = 1_000_000
_ODD = np.uint64(0x9E3779B97F4A7C15)


class WordNumbers:
    """Gives a word its number, which is the same in every process: its CRC-32, kept for words that come again."""

    def __init__(self) -> None:
        self._number_cache: dict[str, int] = {}

    def number_words(self, text: str) -> Words:
        """Return the numbers of a text's words in order."""
        number_of_word = self._number_cache
        if len(number_of_word) > _MAX_KNOWN:
            number_of_word.clear()
        terms = WORD.findall(text)
        for word in [word for word in set(terms) if word not in number_of_word]:
            number_of_word[word] = zlib.crc32(word.encode("utf-8", "surrogatepass"))
        return np.fromiter(map(number_of_word.__getitem__, terms), np.uint32, len(terms))


def pairs_of(words: Words) -> Grams:
    """Return a number for each pair of neighbours; one less than there are words."""
    return (words[:-1].astype(np.uint64) * _ODD) ^ (words[1:].astype(np.uint64) + np.uint64(1 << 33))


def singles_of(words: Words) -> Grams:
    """Return a number for each word, from another range than that of pairs."""
    return words.astype(np.uint64)


class DocumentCounts:
    """In how many documents a gram is, in a table of fixed size; two grams that share a cell can only make it more."""

    def __init__(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.uint16)

    def count_grams(self, grams: Grams) -> None:
        """Count one document's grams, each once."""
        cells = np.unique(self._table_cells(grams))
        self._table[cells] += self._table[cells] < np.iinfo(np.uint16).max

    def look_up_counts(self, grams: Grams) -> npt.NDArray[np.uint16]:
        """Return the counts; they saturate at 65,535."""
        return self._table[self._table_cells(grams)]

    def _table_cells(self, grams: Grams) -> npt.NDArray[np.int64]:
        mixed = (grams ^ (grams >> np.uint64(29))) * _ODD
        return (mixed >> self._shift).astype(np.int64)


@dataclass(frozen=True)
class _Extent:
    start: int
    words: int


class WordSpool(Closeable):
    """The words of every document, in a file that is gone when it is closed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._extents: list[_Extent] = []

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._extents)

    def __iter__(self) -> Iterator[Words]:
        return (self[number] for number in range(len(self)))

    def append_words(self, words: Words) -> None:
        """Add the next document."""
        start = self._extents[-1].start + 4 * self._extents[-1].words if self._extents else 0
        self._file.seek(start)
        self._file.write(words.tobytes())
        self._extents.append(_Extent(start, len(words)))

    def __getitem__(self, number: int) -> Words:
        extent = self._extents[number]
        self._file.seek(extent.start)
        return np.frombuffer(self._file.read(4 * extent.words), np.uint32)


_AROUND = 24
_MOST = 96
_UNSEEN = re.compile(r"[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]")
"""Characters that Python calls printable or alphanumeric, and that no font shows."""


class ScanSettings(RuleSettings):
    """The keys that every scan has: a finding sets the document aside unless a recipe says otherwise."""

    outcome: Literal["quarantine", "drop", "tag"] = "quarantine"


def describe_place(text: str, start: int, end: int) -> str:
    """Say where a finding is, with the text around it: ``at character 120: "..."``, at most some hundred characters."""
    first, last = max(start - _AROUND, 0), min(end, start + _MOST) + _AROUND
    shown = escape_invisible(text[first:last])
    return f'at character {start}: "{"..." if first else ""}{shown}{"..." if last < len(text) else ""}"'


def escape_invisible(text: str) -> str:
    """Return the text with the code point in place of each character that is not plainly visible."""
    return "".join(character if _is_visible(character) else f"\\u{{{ord(character):x}}}" for character in text)


def _is_visible(one: str) -> bool:
    return one.isprintable() and not _UNSEEN.match(one)


def outcome_of(config: ScanSettings, measure: str, value: float | str, limit: float | str = "") -> Outcome:
    """Return the outcome that the settings give a document with a finding."""
    reason = RuleReason(measure, value, limit)
    if config.outcome == "drop":
        return Drop(reason)
    if config.outcome == "tag":
        return Tag({f"scan_{config.kind}": f"{measure}: {value}"})
    return Quarantine(reason)
