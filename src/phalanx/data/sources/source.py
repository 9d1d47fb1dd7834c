"""The interface of every source of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from phalanx.config import StrictModel


class SourceSettings(StrictModel):
    """The keys of a source in a run file; each has its own, and its name as the only value of `kind`."""

    kind: str


@dataclass(frozen=True)
class Document:
    """One text, and a name that finds it again in an error message."""

    name: str
    text: str


class Source(Protocol):
    """Text that can be named by a digest without being taken apart, and read as a stream of documents."""

    def fingerprint(self) -> str:
        """SHA-256 in hex over everything that decides which documents come out."""
        ...

    def documents(self) -> Iterator[Document]:
        """Every document, in an order that depends on the content only."""
        ...
