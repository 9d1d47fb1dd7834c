"""Pieces of work: files that are read together, or a span of a large one, and the digest of their content."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from phalanx.data.build.recipe import DataRecipe
from phalanx.data.sources import BrokenRecord, Document, FileSource, Source
from phalanx.data.sources.files import SourceFile, unreadable_error
from phalanx.data.sources.spans import FileSpan
from phalanx.errors import DataError
from phalanx.object_stores import client_errors

_PIECE_BYTES = 4 << 20
_MAX_FILES = 512
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class SourcePiece:
    """Consecutive files of one source: small ones go together, a large one goes alone, or span by span.

    Attributes:
        size_bytes: Size of the files on disk; 0 where it is unknown.
        limit: Records of each file that are read at most; None of a whole build.
        span: The part of the one file that is meant; None of all of it.
        part: Number of the part within the file, from 0.
        digest: SHA-256 of the whole file, in hex, where a part is meant.
    """

    source: int
    first: int = 0
    names: tuple[str, ...] = ()
    size_bytes: int = 0
    limit: int | None = None
    span: FileSpan | None = None
    part: int = 0
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "names": list(self.names)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SourcePiece":
        """Read what `to_json` returned."""
        span = None if value["span"] is None else FileSpan(**value["span"])
        if span is not None and span.groups is not None:
            span = replace(span, groups=(span.groups[0], span.groups[1]))
        return cls(**{**value, "names": tuple(value["names"]), "span": span})

    def file_digests(self, digests: list[str]) -> list[tuple[str, str]]:
        """Return name and digest of each file that begins in this piece; `digests` are of all its files."""
        if self.span is None:
            return list(zip(self.names or ("",), digests, strict=True))
        return [] if self.part else [(self.names[0], self.digest)]


def list_pieces(recipe: DataRecipe, opened: Callable[[int], Source]) -> list[SourcePiece]:
    """Return all pieces of work of a recipe, in the order of sources and files."""
    return [
        part
        for number in range(len(recipe.sources))
        for piece in _source_pieces(number, opened(number))
        for part in _span_pieces(piece, opened(number))
    ]


def _source_pieces(number: int, source: Source) -> Iterator[SourcePiece]:
    files = files_of(source)
    if files is None:
        yield SourcePiece(number)
        return
    first, size = 0, 0
    for position, file in enumerate(files):
        size_bytes = _file_size(file)
        if position > first and (size + size_bytes > _PIECE_BYTES or position - first >= _MAX_FILES):
            yield SourcePiece(number, first, tuple(entry.name for entry in files[first:position]), size)
            first, size = position, 0
        size += size_bytes
    yield SourcePiece(number, first, tuple(entry.name for entry in files[first:]), size)


def _span_pieces(piece: SourcePiece, source: Source) -> Iterator[SourcePiece]:
    """Yield a piece of one large file span by span, where its kind can be cut; any other piece as it is."""
    cut = getattr(source, "cut_spans", None)
    if cut is None or len(piece.names) != 1 or piece.size_bytes < 2 * _PIECE_BYTES:
        yield piece
        return
    file = cast("FileSource", source).files[piece.first]
    spans: list[FileSpan] = cut(file, _PIECE_BYTES)
    digest = _digest_file(file) if spans else ""
    for part, span in enumerate(spans):
        span_digest = digest if span.groups is not None else _digest_file(replace(file, span=span))
        size = piece.size_bytes // len(spans)
        yield replace(piece, size_bytes=size, span=replace(span, digest=span_digest), part=part, digest=digest)
    if not spans:
        yield piece


def files_of(source: Source) -> list[SourceFile] | None:
    """Return the files of a source; None of one that is read as a whole."""
    files = getattr(source, "files", None)
    return None if files is None else list(files)


def _file_size(file: SourceFile) -> int:
    if file.passed_over is not None:
        return 0
    if isinstance(file.path, str):
        # an object in a store goes alone: it is not asked for its size
        return _PIECE_BYTES
    try:
        return file.path.stat().st_size
    except OSError as exc:
        raise unreadable_error(file.path, exc) from exc


class PieceReader:
    """Reads the records of one piece, and says by which bytes its documents were decided."""

    def __init__(self, source: Source, piece: SourcePiece) -> None:
        """Find the files of the piece."""
        self._source, self._piece = source, piece
        self._files: list[SourceFile] = []
        if piece.names:
            source_files = (files_of(source) or [])[piece.first : piece.first + len(piece.names)]
            if tuple(file.name for file in source_files) != piece.names:
                raise DataError(
                    f"files of a source changed while it was read: expected {piece.names[0]!r} as file {piece.first}; "
                    "run the build again"
                )
            self._files = [replace(file, span=piece.span) for file in source_files] if piece.span else source_files

    def digest_files(self) -> list[str]:
        """Return the SHA-256 of each file, or of the span, in hex, or the fingerprint of a source that has no files.

        Raises:
            DataError: A span is another than when the file was cut.
        """
        if not self._files:
            return [self._source.fingerprint()]
        digests = [_digest_file(file) for file in self._files]
        if self._piece.span is not None and digests != [self._piece.span.digest]:
            raise _changed_error(self._files[0])
        return digests

    def read_records(self) -> Iterator[Document | BrokenRecord]:
        """Yield every record, in order."""
        limit = self._piece.limit
        if not self._files:
            yield from _take_first(self._source.documents(), limit)
            return
        for file in self._files:
            yield from _take_first(cast("FileSource", self._source).read_file_records(file), limit)

    def check_unchanged(self, digests: list[str]) -> None:
        """Compare the files with their earlier digests."""
        for file, before in zip(self._files, digests, strict=False):
            if _digest_file(file) != before:
                raise _changed_error(file)


def _changed_error(file: SourceFile) -> DataError:
    return DataError(f"{file.path}: changed while it was read; run the build again")


def _take_first(records: Iterator[Any], limit: int | None) -> Iterator[Any]:
    for number, record in enumerate(records):
        if limit is not None and number >= limit:
            return
        yield record


def _digest_file(file: SourceFile) -> str:
    total = hashlib.sha256()
    with file.open_bytes() as stream:
        try:
            while block := stream.read(_BLOCK_BYTES):
                total.update(block)
        except client_errors() as exc:
            raise unreadable_error(file.path, exc) from exc
    return total.hexdigest()
