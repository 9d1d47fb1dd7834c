"""Documents in memory, as a build hands them to a corpus scan."""

import random

from phalanx.data.rules import Page
from phalanx.data.sources import Document

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]


class Corpus:
    """All documents by number."""

    def __init__(self, documents):
        self.pages = [one if isinstance(one, Page) else Page(one, "web") for one in documents]

    def __len__(self):
        return len(self.pages)

    def read_page(self, number):
        return self.pages[number]


def decide(scan, documents):
    """What a scan says of each document that does not pass."""
    corpus = Corpus(documents)
    return dict(scan.decide_outcomes([scan.mark_page(page) for page in corpus.pages], corpus))


def sentences(rng, count):
    """Text in which the same pairs of words come again and again, as in any language."""
    starts = [rng.randrange(len(WORDS)) for _ in range(count)]
    return ". ".join(" ".join(WORDS[(start + 7 * at) % len(WORDS)] for at in range(9)) for start in starts) + "."


def gibberish(rng, count):
    """Words in an order that nothing else has."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 6))) for _ in range(count))


def as_documents(texts, **fields):
    return [Document(f"d{number}", text, fields=fields) for number, text in enumerate(texts)]


def rng(seed=0):
    return random.Random(seed)
