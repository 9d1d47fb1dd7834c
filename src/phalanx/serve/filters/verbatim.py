"""A scan for long runs of training text, by an index of hashes that holds no text."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from phalanx.data.normal_form import to_nfc
from phalanx.data.rules.duplicates.gram_index import sampled_grams
from phalanx.data.rules.word_files import fold_case
from phalanx.errors import DataError, writing_cure
from phalanx.serve.filters.note import Finding

GRAM_BYTES, WINDOW_BYTES = 160, 64
"""A run of 223 bytes, about 50 tokens, is always found; one shorter than 160 bytes never."""
_VERSION = 1
_HEAD = np.array([0x7068785F76657262, _VERSION, GRAM_BYTES, WINDOW_BYTES], np.uint64)
_BLANKS = str.maketrans("\n\t\r\f\v\u00a0", "      ")


class VerbatimIndex:
    """Hashes of sampled grams of a corpus, sorted, in a file that is mapped into memory.

    Source: Schleimer, Wilkerson, Aiken 2003 (winnowing).
    """

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._hashes = hashes

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open an index."""
        try:
            numbers = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as exc:
            raise DataError(f"{path}: is no index of training text; VerbatimIndex.write makes one") from exc
        head = len(_HEAD)
        if numbers.dtype != np.uint64 or numbers.ndim != 1 or not np.array_equal(numbers[:head], _HEAD):
            raise DataError(f"{path}: is an index of another version; make it anew")
        return cls(numbers[head:])

    @classmethod
    def write(cls, path: Path, texts: Iterable[str]) -> int:
        """Make an index of texts, in the form in which a run learns them; about 8 bytes for every 32 bytes of text.

        Returns:
            Number of grams.
        """
        learned = (to_nfc(text.replace("\r\n", "\n").replace("\r", "\n")) for text in texts)
        parts = [
            np.empty(0, np.uint64),
            *(sampled_grams(_bytes_of(text), GRAM_BYTES, WINDOW_BYTES)[1] for text in learned),
        ]
        hashes = np.unique(np.concatenate(parts))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                np.save(file, np.concatenate((_HEAD, hashes)), allow_pickle=False)
        except OSError as exc:
            raise DataError(f"{path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc
        return len(hashes)

    def find_places(self, text: str) -> list[int]:
        """Return the bytes at which grams begin that stand in the corpus."""
        places, hashes = sampled_grams(_bytes_of(text), GRAM_BYTES, WINDOW_BYTES)
        if not len(places) or not len(self._hashes):
            return []
        positions = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        hits: list[int] = places[self._hashes[positions] == hashes].tolist()
        return hits


class VerbatimSpans:
    """Runs of training text, in any case and with any kind of blank.

    Guarantees:
        Finds every run of 223 bytes of UTF-8 of a text in the index. What a stream has let out before a run is long
        enough to count stays out: fewer than 223 bytes. Does not find changed words, or runs with further blanks.
    """

    trigger = ""

    def __init__(self, index: VerbatimIndex) -> None:
        self._index = index

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``training_text``; overlapping grams are one finding."""
        del is_cut
        start = stop = -1
        for place in self._index.find_places(text):
            if place > stop >= 0:
                yield _characters(text, start, stop)
                start = -1
            start, stop = (place if start < 0 else start), place + GRAM_BYTES
        if start >= 0:
            yield _characters(text, start, stop)

    def open_start(self, text: str) -> int:
        """A run counts once it is long enough."""
        return len(text)


def _characters(text: str, start: int, end: int) -> Finding:
    content = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    # every character has one byte that continues none
    begins = (content & 0xC0) != 0x80
    return Finding("training_text", *(int(np.count_nonzero(begins[:place])) for place in (start, end)))


def _bytes_of(text: str) -> NDArray[np.uint8]:
    plain = text.translate(_BLANKS)
    low = fold_case(plain)
    if not plain.isascii():
        # the lower case of a few letters has another number of bytes; they are left as they are
        pairs = zip(plain, low, strict=True)
        low = "".join(small if _num_bytes(small) == _num_bytes(letter) else letter for letter, small in pairs)
    return np.frombuffer(low.encode("utf-8", "surrogatepass"), np.uint8)


def _num_bytes(letter: str) -> int:
    return len(letter.encode("utf-8", "surrogatepass"))
