"""What every source of text offers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from phalanx.config import StrictModel


class SourceSettings(StrictModel):
    """What a run file says of a source; each has its own keys, and its name as the only value of `kind`."""

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
