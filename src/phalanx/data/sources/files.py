"""Files of a source: found in a fixed order, read whole or by line, every failure a DataError."""

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

from pydantic import PlainSerializer, WrapValidator

from phalanx.access_gate import note_read
from phalanx.data.sources.spans import FileSpan
from phalanx.errors import DataError
from phalanx.object_stores import client_errors, open_store, reason_of

PACKED = (".gz", ".zst")
"""Suffixes of files that are unpacked when they are read."""
_BLOCK_BYTES = 1 << 20


_ADDRESS = re.compile(r"[a-z][a-z0-9]*://.")


def _address_or_path(value: object, to_path: Callable[[object], Path]) -> Path | str:
    return value if isinstance(value, str) and _ADDRESS.match(value) else to_path(value)


if TYPE_CHECKING:
    Location = Path | str
else:
    Location = Annotated[Path, WrapValidator(_address_or_path), PlainSerializer(str, when_used="json")]
"""A path on this machine, or the address of an object store: ``s3://bucket/folder``."""


@dataclass(frozen=True)
class SkipReason:
    """Why a file is not read.

    Attributes:
        size_bytes: Size of it, or of all below it.
        is_fault: Whether text may be missing that its owner meant to be there; a run without an account then stops.
    """

    reason: str
    size_bytes: int
    is_fault: bool = False


@dataclass(frozen=True)
class SourceFile:
    """A file and its name relative to the source, which is the same on every machine.

    Attributes:
        path: On this machine; or its address, where it is an object in a store.
        span: The part of the file that is meant; None of all of it.
        passed_over: Why it is not read; None of a file that is.
        linked_to: Where it lies below the folder that phalanx was started in, if a link out of the source's folder led
            to it; empty otherwise.
    """

    name: str
    path: Path | str
    span: FileSpan | None = None
    passed_over: SkipReason | None = None
    linked_to: str = ""

    def open_bytes(self) -> BinaryIO:
        """Open its bytes as they lie there, packed or not; the caller must close it.

        A file that is passed over is not touched: its bytes are counted only.
        """
        if self.passed_over is not None:
            return io.BytesIO(f"{self.passed_over}".encode())
        if isinstance(self.path, Path):
            try:
                stream = self.path.open("rb")
            except OSError as exc:
                raise unreadable_error(self.path, exc) from exc
            return stream if self.span is None else self.span.open_span(stream)
        files, root = _open_address(self.path)
        try:
            return cast("BinaryIO", files.open(root, "rb"))
        except client_errors() as exc:
            raise unreadable_error(self.path, exc) from exc


def list_objects(address: str) -> SourceFile | list[tuple[SourceFile, int]] | None:
    """Return the object at an address, or every object below it with its size; None where there is nothing."""
    files, root = _open_address(address)
    scheme = address.partition("://")[0]
    try:
        if files.isfile(root):
            return SourceFile(root.rpartition("/")[2], address)
        sizes = {str(path): int(facts.get("size") or 0) for path, facts in files.find(root, detail=True).items()}
    except client_errors() as exc:
        raise unreadable_error(address, exc) from exc
    prefix = f"{root.rstrip('/')}/"
    return [
        (SourceFile(path.removeprefix(prefix), f"{scheme}://{path}"), size)
        for path, size in sizes.items()
        if path.startswith(prefix)
    ] or None


def _open_address(address: str) -> tuple[Any, str]:
    try:
        return open_store(address)
    except (ImportError, ValueError) as exc:
        # an unknown protocol is a ValueError
        raise DataError(f"{address}: {exc}; install phalanx-train[s3], or the client that fsspec names").with_facts(
            code="PHX-I011", file=address, do="install phalanx-train[s3]"
        ) from exc


def fingerprint_files(files: Sequence[SourceFile], options: str = "") -> str:
    """SHA-256 in hex over options, names and contents of the files, in the given order."""
    total = hashlib.sha256(f"{len(options.encode())}:{options}".encode())
    for file in files:
        content = hashlib.sha256()
        with file.open_bytes() as stream:
            try:
                while block := stream.read(_BLOCK_BYTES):
                    content.update(block)
            except client_errors() as exc:
                raise unreadable_error(file.path, exc) from exc
        total.update(f"{len(file.name.encode())}:{file.name}".encode() + content.digest())
    return total.hexdigest()


def note_file_read(path: Path) -> None:
    """Write down, where roles govern the place, that a file of data is read; its digest is SHA-256 of its bytes.

    Raises:
        RoleError: Whoever reads has no role there.
        OSError: It cannot be read.
    """
    note_read("file", lambda: _hash_file(path), path)


def _hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; ``.gz`` is unpacked."""
    return b"".join(_read_blocks(path))


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file, decoded strictly; a byte-order mark is left out."""
    return decode_text(read_bytes(path), str(path), encoding)


def decode_text(content: bytes, where: str, encoding: str = "utf-8") -> str:
    """Decode strictly; `where` names the place in the error."""
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as exc:
        raise DataError(
            f"{where}: byte {exc.start} (0x{content[exc.start]:02x}) is not {encoding}; convert the file to UTF-8"
        ).with_facts(
            code="PHX-I015",
            file=where,
            found=f"byte 0x{content[exc.start]:02x}",
            expected=encoding,
            do="convert the file to UTF-8",
        ) from exc
    except LookupError as exc:
        raise DataError(f"{where}: unknown encoding {encoding!r}; use a name that Python knows") from exc


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends, one in memory at a time; ``.gz`` is unpacked."""
    try:
        with _open_path(path) as stream:
            for row in stream:
                yield row.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error) as exc:
        raise unreadable_error(path, exc) from exc


def _read_blocks(path: Path) -> Iterator[bytes]:
    try:
        with _open_path(path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except (OSError, EOFError, zlib.error) as exc:
        raise unreadable_error(path, exc) from exc


def _open_path(path: Path) -> BinaryIO:
    note_file_read(path)
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def unreadable_error(place: Path | str, exc: Exception) -> DataError:
    """Say that a file cannot be read, and why."""
    # of a store the type alone: its client's own text may repeat a request with its credentials
    reason = (getattr(exc, "strerror", None) or str(exc)) if isinstance(place, Path) else reason_of(exc)
    return DataError(f"{place}: cannot be read ({reason}); check the file and its permissions")
