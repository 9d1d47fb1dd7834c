"""The interface of every source of text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.config import StrictModel
from phalanx.data.sources.files import SourceFile


class SourceSettings(StrictModel):
    """The keys of a source in a run file; each has its own, and its name as the only value of `kind`."""

    kind: str


@dataclass(frozen=True)
class Origin:
    """What is known of the bytes that a document was taken out of.

    Attributes:
        raw_bytes: Size of its record as fetched, unpacked, before any text was taken out.
        raw_digest: SHA-256 in hex of these bytes.
        fetched_at: Recorded time (RFC 3339).
        recorded_digest: The archive's own digest, as ``algorithm:value``; a claim.
        digest_holds: Whether the payload has that digest; None where none is recorded or it cannot be checked.
    """

    raw_bytes: int
    raw_digest: str
    url: str | None = None
    fetched_at: str | None = None
    recorded_digest: str | None = None
    digest_holds: bool | None = None


@dataclass(frozen=True)
class Document:
    """One text, and a name that finds it again in an error message.

    Attributes:
        name: The same on every machine.
        origin: Origin of its bytes; None where a source does not tell, in which case the text's own bytes count.
        fields: Further columns of its record: scores, labels, languages; plain values.
    """

    name: str
    text: str
    origin: Origin | None = None
    fields: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class BrokenRecord:
    """A record that no text could be taken out of: it is counted and told, never passed over in silence.

    Attributes:
        name: The same on every machine.
        raw_bytes: Its size, as in `Origin`; of what could not be unpacked, the packed size.
        is_unsupported: Whether it is whole, but nothing that this source reads: an image, a request, a blank line.
    """

    name: str
    raw_bytes: int
    reason: str
    is_unsupported: bool = False


class Source(Protocol):
    """Text that can be named by a digest without being taken apart, and read as a stream of documents."""

    def fingerprint(self) -> str:
        """SHA-256 in hex over everything that decides which documents come out."""

    def documents(self) -> Iterator[Document]:
        """Every document, in an order that depends on the content only."""


class FileSource(Source, Protocol):
    """A source of files that several processes can read apart from each other."""

    @property
    def files(self) -> Sequence[SourceFile]:
        """All files, in the order of their documents."""

    def read_file_records(self, file: SourceFile) -> Iterator[Document | BrokenRecord]:
        """Every record of one file, in order."""
