"""Documents on their way from the sources to the tokenizer: cleaned, without doubles, split, on disk."""

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from phalanx.config import printable_text
from phalanx.data.manifest import SourceCounts
from phalanx.data.normal_form import to_nfc
from phalanx.data.sources import Document, Source
from phalanx.errors import DataError

Progress = Callable[[str, int], None]
_PREFIX = struct.Struct("<IIQ")
_REPORT_EVERY = 200
_NAMED_FILES, _NAME_CHARACTERS = 5, 60


@dataclass(frozen=True)
class KeptText:
    """A document as it is kept."""

    text: str
    source: int
    name: str


@dataclass
class SplitSpool:
    """The kept documents of one split, as length-prefixed UTF-8 in one file."""

    path: Path
    documents: int = 0
    size_bytes: int = 0

    def append_text(self, stream: BinaryIO, content: bytes, source: int, name: str) -> None:
        """Add one document and count it."""
        # a file's name can hold bytes that are no text
        named = name.encode(errors="replace")
        stream.write(_PREFIX.pack(source, len(named), len(content)) + named + content)
        self.documents += 1
        self.size_bytes += len(content)

    def kept_documents(self) -> Iterator[KeptText]:
        """Every document, in the order in which it was kept."""
        with self.path.open("rb") as stream:
            while prefix := stream.read(_PREFIX.size):
                source, name_bytes, size = _PREFIX.unpack(prefix)
                name = stream.read(name_bytes).decode()
                yield KeptText(stream.read(size).decode(), source, name)

    def kept_texts(self) -> Iterator[str]:
        """The text of every document, in the order in which it was kept."""
        return (document.text for document in self.kept_documents())


@dataclass
class Spool:
    """Both splits, and the counts that account for every document that a source gave."""

    train: SplitSpool
    validation: SplitSpool
    sources: list[SourceCounts] = field(default_factory=list)


@dataclass(frozen=True)
class Intake:
    """The intake of documents: which are kept and where they go, by the rules of one run.

    Attributes:
        validation_share: A document is held out when its hash, a number in [0, 1), is below this.
        max_documents: Stop after so many kept documents.
    """

    seed: int
    validation_share: float
    max_documents: int | None

    def spool_sources(self, sources: Iterable[tuple[str, Source]], directory: Path, report: Progress) -> Spool:
        """Read every source once and write the kept documents to two files.

        Equal texts (after Unicode NFC, unified line ends, and stripping) are kept once, over all sources
        and both splits, so no text is in training and in validation. The split looks at content and seed
        only: adding documents moves no other document across.

        Raises:
            DataError: From the sources, or a text holds a lone surrogate.
        """
        spool = Spool(SplitSpool(directory / "train.spool"), SplitSpool(directory / "validation.spool"))
        seen: set[bytes] = set()
        with spool.train.path.open("wb") as train, spool.validation.path.open("wb") as validation:
            for number, (kind, source) in enumerate(sources):
                counts = _Counts()
                if passed_over := getattr(source, "passed_over", ()):
                    report(f"skipped ({_name_files(passed_over)})", len(passed_over))
                for document in self._limited_documents(source, seen):
                    content = clean_text(document)
                    digest = hashlib.sha256(content).digest()
                    if not counts.admit_text(content, is_new=digest not in seen):
                        continue
                    seen.add(digest)
                    if self._is_held_out(digest):
                        spool.validation.append_text(validation, content, number, document.name)
                    else:
                        spool.train.append_text(train, content, number, document.name)
                    if len(seen) % _REPORT_EVERY == 0:
                        report("read", len(seen))
                spool.sources.append(counts.to_source_counts(kind, source.fingerprint()))
        report("read", len(seen))
        return spool

    def _limited_documents(self, source: Source, seen: set[bytes]) -> Iterator[Document]:
        if self.max_documents is None:
            return source.documents()
        return itertools.takewhile(lambda _: len(seen) < (self.max_documents or 0), source.documents())

    def _is_held_out(self, digest: bytes) -> bool:
        draw = hashlib.sha256(f"split {self.seed} ".encode() + digest).digest()
        return int.from_bytes(draw[:8], "big") < self.validation_share * 2**64


def _name_files(files: Sequence[str]) -> str:
    named = ", ".join(printable_text(name, _NAME_CHARACTERS) for name in files[:_NAMED_FILES])
    return named if len(files) <= _NAMED_FILES else f"{named}, ..."


@dataclass
class _Counts:
    documents: int = 0
    size_bytes: int = 0
    empty_documents: int = 0
    duplicate_documents: int = 0
    duplicate_bytes: int = 0

    def admit_text(self, content: bytes, *, is_new: bool) -> bool:
        self.documents += 1
        self.size_bytes += len(content)
        if not content:
            self.empty_documents += 1
        elif not is_new:
            self.duplicate_documents += 1
            self.duplicate_bytes += len(content)
        return bool(content) and is_new

    def to_source_counts(self, kind: str, fingerprint: str) -> SourceCounts:
        return SourceCounts(kind=kind, fingerprint=fingerprint, **vars(self))


def clean_text(document: Document) -> bytes:
    """Return the text of a document as it is kept: unified line ends, NFC, nothing around it."""
    text = document.text.replace("\r\n", "\n").replace("\r", "\n").strip()
    try:
        return to_nfc(text).encode()
    except UnicodeEncodeError as exc:
        raise DataError(
            f"{document.name}: character {exc.start} is a lone surrogate, which is not text; repair the document"
        ) from exc
