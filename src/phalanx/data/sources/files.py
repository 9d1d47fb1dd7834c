"""Files of a source: found in a fixed order, read whole or by line, every failure a DataError."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from phalanx.errors import DataError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file and its name relative to the source, which is the same on every machine."""

    name: str
    path: Path


def list_files(path: Path, suffixes: tuple[str, ...]) -> list[SourceFile]:
    """List a single file, or every file below a directory with one of the suffixes, sorted by name.

    Args:
        path: A file (any suffix) or a directory.
        suffixes: For example ``(".txt",)``; ``.txt.gz`` is then meant too.

    Raises:
        DataError: There is nothing at `path`, or nothing of that kind below it.
    """
    if path.is_file():
        return [SourceFile(path.name, path)]
    if not path.is_dir():
        raise DataError(f"{path}: not found; give the path of a file or a directory").about(
            code="PHX-I011", file=str(path), do="give the path of a file or a directory"
        )
    wanted = suffixes + tuple(f"{suffix}.gz" for suffix in suffixes)
    found = [
        SourceFile(item.relative_to(path).as_posix(), item)
        for item in path.rglob("*")
        if item.name.lower().endswith(wanted) and item.is_file()
    ]
    if not found:
        raise DataError(f"{path}: no file of this source's kind found; expected {', '.join(wanted)}").about(
            code="PHX-I011", file=str(path), expected=", ".join(wanted)
        )
    return sorted(found, key=lambda file: file.name)


def fingerprint_files(files: list[SourceFile], options: str = "") -> str:
    """SHA-256 in hex over options, names and contents of the files, in the given order."""
    total = hashlib.sha256(f"{len(options.encode())}:{options}".encode())
    for file in files:
        content = hashlib.sha256()
        try:
            with file.path.open("rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    content.update(block)
        except OSError as exc:
            raise _unreadable(file.path, exc) from exc
        total.update(f"{len(file.name.encode())}:{file.name}".encode() + content.digest())
    return total.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; ``.gz`` is unpacked."""
    return b"".join(_blocks(path))


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file, decoded strictly; a byte-order mark is left out.

    Raises:
        DataError: Names the file, the first byte that does not decode, and the encoding tried.
    """
    return decode(read_bytes(path), str(path), encoding)


def decode(content: bytes, where: str, encoding: str = "utf-8") -> str:
    """Decode strictly; `where` names the place in the error."""
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as exc:
        raise DataError(
            f"{where}: byte {exc.start} (0x{content[exc.start]:02x}) is not {encoding}; convert the file to UTF-8"
        ).about(code="PHX-I015", file=where, expected=encoding, do="convert the file to UTF-8") from exc
    except LookupError as exc:
        raise DataError(f"{where}: unknown encoding {encoding!r}; use a name that Python knows") from exc


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends, one in memory at a time; ``.gz`` is unpacked."""
    try:
        with _open(path) as stream:
            for line in stream:
                yield line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error) as exc:
        raise _unreadable(path, exc) from exc


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except (OSError, EOFError, zlib.error) as exc:
        raise _unreadable(path, exc) from exc


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _unreadable(path: Path, exc: Exception) -> DataError:
    reason = getattr(exc, "strerror", None) or str(exc)
    return DataError(f"{path}: cannot be read ({reason}); check the file and its permissions")
