"""Bursts: one site or source that gives many near copies of one text, as a campaign of planted pages does."""

import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome, Texts
from phalanx.data.scan.word_stream import ScanSettings, WordNumbers, Words, escape_invisible, outcome_of

_HASHES = 24
_SHINGLE = 4
_BUCKETS = 4
_ODD = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = struct.pack("<I", 0)
Sketch = npt.NDArray[np.uint32]


class BurstsConfig(ScanSettings):
    """Many near copies from one site, or from one source where no address is recorded.

    Attributes:
        min_documents: Near copies of each other that are a burst.
        alike: Share of four-word pieces that two near copies have in common (Jaccard, estimated).
    """

    kind: Literal["bursts"] = "bursts"
    min_documents: int = Field(default=20, ge=2, alias="least_documents")
    alike: float = Field(default=0.5, gt=0.0, le=1.0)


class Bursts:
    """Sets aside all documents of a burst, the first one too: whichever is the original, the burst is unusual.

    Guarantees:
        Finds copies of a site that differ in some words. Does not find copies spread over many sites, texts that were
        rewritten, and texts of fewer than four words.
    """

    def __init__(self, config: BurstsConfig) -> None:
        self._config, self._numbers = config, WordNumbers()

    def mark_page(self, page: Page) -> bytes:
        """Return the site's number and the smallest hashes of the pieces: about a hundred bytes."""
        sketch = _make_sketch(self._numbers.number_words(page.text))
        return struct.pack("<I", zlib.crc32(_page_site(page).encode("utf-8", "replace"))) + sketch.tobytes()

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Join near copies of one site, and tell the groups that are large enough."""
        groups = _NearCopies(self._config.alike)
        for number, mark in enumerate(marks):
            groups.add_document(number, mark[: len(_EMPTY)], np.frombuffer(mark, np.uint32, offset=len(_EMPTY)))
        firsts = groups.first_documents()
        sizes = Counter(firsts)
        names: dict[int, str] = {}
        for number, first in enumerate(firsts):
            if sizes[first] >= self._config.min_documents:
                page = texts.read_page(number)
                names.setdefault(first, texts.read_page(first).document.name)
                site = escape_invisible(_page_site(page))[:80]
                value = f"{sizes[first]} near copies from {site}; the first is {escape_invisible(names[first])[:120]}"
                yield number, outcome_of(self._config, "near copies", value, self._config.min_documents)


class _NearCopies:
    """Joins documents with sketches that agree; one document of a group stands for it in each bucket."""

    def __init__(self, alike: float) -> None:
        self._alike = alike
        self._parent: list[int] = []
        self._sketches: dict[int, Sketch] = {}
        self._buckets: defaultdict[tuple[bytes, int], list[int]] = defaultdict(list)

    def add_document(self, number: int, site: bytes, sketch: Sketch) -> None:
        """Compare a document with documents that share one of its smallest hashes at the same site."""
        self._parent.append(number)
        stands_alone = True
        for smallest in sketch[:_BUCKETS].tolist():
            bucket = self._buckets[site, smallest]
            for other in bucket:
                if (
                    self._find_root(other) != self._find_root(number)
                    and _estimate_similarity(self._sketches[other], sketch) >= self._alike
                ):
                    self._parent[self._find_root(number)] = self._find_root(other)
                    stands_alone = False
            if stands_alone and len(bucket) < _BUCKETS:
                bucket.append(number)
                self._sketches[number] = sketch

    def first_documents(self) -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(self._find_root(number), number) for number in range(len(self._parent))]

    def _find_root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number


def _make_sketch(words: Words) -> Sketch:
    """Return the smallest hashes of all pieces of four words, in order (bottom-k sketch)."""
    if len(words) < _SHINGLE:
        return np.zeros(0, np.uint32)
    last = len(words) - _SHINGLE + 1
    mixed = np.zeros(last, np.uint64)
    for offset in range(_SHINGLE):
        mixed = (mixed ^ words[offset : offset + last].astype(np.uint64)) * _ODD
        mixed ^= mixed >> np.uint64(29)
    return np.unique((mixed >> np.uint64(32)).astype(np.uint32))[:_HASHES]


def _estimate_similarity(one: Sketch, other: Sketch) -> float:
    """Estimate the Jaccard similarity from the smallest hashes of both together."""
    union = np.union1d(one, other)[:_HASHES]
    is_shared = np.isin(union, one) & np.isin(union, other)
    return float(is_shared.mean()) if len(union) else 0.0


def _page_site(page: Page) -> str:
    origin = page.document.origin
    try:
        host = urlsplit(origin.url).hostname if origin and origin.url else None
    except ValueError:
        host = None
    return host or f"source {page.source}"
