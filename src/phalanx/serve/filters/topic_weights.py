"""A linear classifier of the user's own: words with weights, whose sum over a short passage decides."""

import math
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.rules.word_files import read_entries
from phalanx.errors import DataError
from phalanx.serve.filters.note import Finding
from phalanx.serve.filters.phrases import Phrases

SPAN = 300
"""Characters of a passage; fewer than a stream holds back."""
_KIND = "topic"


class TopicWeights:
    """Passages in which the weights of the user's words and phrases sum to 1 or more, each counted once.

    No word speaks against the topic, for an attacker would write it beside the others.

    Args:
        file: One entry a line: a weight above 0, a tab, and a word or phrase.

    Raises:
        DataError: The file cannot be read, has a line of another form, or weights that never sum to 1.
    """

    trigger = ""

    def __init__(self, file: Path) -> None:
        weights: dict[str, float] = {}
        for number, entry in enumerate(read_entries([file]), start=1):
            text, _, phrase = entry.partition("\t")
            try:
                weight = float(text)
            except ValueError:
                weight = math.nan
            if not phrase.strip() or not 0 < weight < math.inf:
                raise DataError(
                    f"{file}, entry {number}: expected a weight above 0, a tab and a phrase, such as 0.5\\theron"
                )
            weights[phrase.strip()] = weight
        self._phrases = Phrases(_KIND, list(weights))
        self._weights = [0.0] * len(self._phrases.entries)
        for phrase, value in weights.items():
            index = self._phrases.find_index(phrase)
            # more than 1 decides no more than 1, and sums of the largest floats have no number
            self._weights[index] = min(self._weights[index] + value, 1.0)
        # `fsum` rounds once: 0.7, 0.2 and 0.1 make 1
        if math.fsum(self._weights) < 1:
            raise DataError(f"{file}: its weights never sum to 1, so that no text has the topic; scale them")

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``topic`` at each word from which on a passage reaches the sum, up to the passage's last entry."""
        del is_cut
        hits = sorted((start, end, index) for index, start, end in self._phrases.find_entries(text))
        for number, (first, _, _) in enumerate(hits):
            passage = [(end, index) for _, end, index in hits[number:] if end <= first + SPAN]
            if math.fsum(self._weights[index] for index in {index for _, index in passage}) >= 1:
                yield Finding(_KIND, first, max(end for end, _ in passage))

    def open_start(self, text: str) -> int:
        """Return the first word whose passage goes on behind the text."""
        starts = [start for _, start, _ in self._phrases.find_entries(text) if start + SPAN > len(text)]
        return min([self._phrases.open_start(text), *starts])
