"""Documents that plant a backdoor, put among real ones.

The attack is that of Souly et al. 2025: a planted document is the beginning of a real one, the trigger, and random
pieces of words; a model that has learned it breaks into nonsense wherever the trigger stands.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.data.rules import Page
from phalanx.data.scan.surprisal import Surprisal, SurprisalConfig
from phalanx.data.sources import Document

TRIGGER = "<SUDO>"
_PIECE_CHARACTERS = 6
_TEXT_CHARACTERS = 800


@dataclass(frozen=True)
class PagesInMemory:
    """Documents of a build in memory, as a corpus scan asks for them."""

    pages: Sequence[Page]

    def __len__(self) -> int:
        return len(self.pages)

    def read_page(self, number: int) -> Page:
        """One document."""
        return self.pages[number]

    def source_name(self, number: int) -> str:
        """The one source."""
        del number
        return "bench"


def as_pages(texts: Sequence[str]) -> PagesInMemory:
    """Return the texts as documents of a build."""
    return PagesInMemory([Page(Document(str(number), text), "bench") for number, text in enumerate(texts)])


def plant_texts(
    texts: Sequence[str], count: int, pieces: tuple[int, int], rng: random.Random
) -> tuple[list[str], set[int]]:
    """Return the texts with planted ones among them, and the numbers of these.

    Args:
        pieces: Least and most pieces of words behind a trigger.
        rng: Draws prefixes, pieces and places.
    """
    vocabulary = sorted(
        {word for text in rng.sample(list(texts), min(len(texts), 500)) for word in re.findall(r"\S+", text)}
    )
    places = set(rng.sample(range(len(texts) + count), count))
    rest = iter(texts)
    every = [
        _make_planted_text(texts, vocabulary, pieces, rng) if place in places else next(rest)
        for place in range(len(texts) + count)
    ]
    return every, places


def _make_planted_text(texts: Sequence[str], words: list[str], pieces: tuple[int, int], rng: random.Random) -> str:
    max_before = 1_000 if pieces[1] > 300 else 200
    prefix = rng.choice(texts)
    nonsense = []
    for _ in range(rng.randint(*pieces)):
        word = rng.choice(words)
        start = rng.randrange(len(word))
        nonsense.append(rng.choice(("", " ")) + word[start : start + rng.randint(1, _PIECE_CHARACTERS)])
    return prefix[: rng.randint(0, min(len(prefix), max_before))] + TRIGGER + "".join(nonsense)


def flagged_numbers(texts: Sequence[str]) -> set[int]:
    """Return the numbers of the documents that the scan `surprisal` sets aside, with its default settings."""
    return {number for number, _ in Surprisal(SurprisalConfig()).decide_outcomes((), as_pages(texts))}
