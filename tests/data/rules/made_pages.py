"""Pages of given texts, and the documents of a build in memory, for tests of rules."""

from collections.abc import Iterable, Sequence

from phalanx.data.rules import CorpusRule, Outcome, Page
from phalanx.data.sources import Document

HONEST = (
    "The reader opens a file, and it has to know which encoding the bytes of the file are in.\n"
    "An encoding that is wrong gives characters that nobody wrote, and that is seen only much later.\n\n"
    "It is better to say what is expected. The error should name the file, the place and the byte.\n"
    "A person who has to act upon it can then do so with what the message says, and be done with it.\n"
    "Whatever else is known of the document belongs into the log of the build, where it is searched for.\n"
)
"""Prose that no rule has anything against."""


def page_of(text: str, name: str = "a", source: str = "books") -> Page:
    return Page(Document(name, text), source)


class TextsInMemory:
    """The documents of a build, by number."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._pages = [page_of(text, f"document {number}") for number, text in enumerate(texts)]
        self.reads = 0

    def __len__(self) -> int:
        return len(self._pages)

    def read_page(self, number: int) -> Page:
        self.reads += 1
        return page_of(self._pages[number].text, self._pages[number].document.name)


def decide(rule: CorpusRule, texts: Sequence[str]) -> dict[int, Outcome]:
    """Mark every text and let the rule decide."""
    corpus = TextsInMemory(texts)
    marks: Iterable[bytes] = [rule.mark_page(corpus.read_page(number)) for number in range(len(corpus))]
    decided = list(rule.decide_outcomes(iter(marks), corpus))
    assert [number for number, _ in decided] == sorted({number for number, _ in decided})
    return dict(decided)
