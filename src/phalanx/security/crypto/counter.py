"""Counters that only go up, and files that are either the old ones or the new ones."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from phalanx.config import canonical_json
from phalanx.errors import DiskError, RollbackError
from phalanx.security.crypto.canonical import parse_canonical

_MAX_FILE_BYTES = 4096
_MAX_COUNT = 2**63 - 1


class MonotonicCounter(Protocol):
    """A number that only goes up and outlives the process, such as a counter in a TPM's non-volatile memory."""

    @property
    def rollback_proof(self) -> bool:
        """Whether the machine that hosts it cannot turn it back; shown wherever a tier is shown."""

    def read_count(self) -> int:
        """Return the last number that `increment` gave, or where it began."""

    def increment(self) -> int:
        """Go up by one and return the new number, once it is durable; each number is given to one caller only."""


class NotRollbackProofCounter:
    """A counter in a file. NOT ROLLBACK-PROOF: any program that can write the file can turn it back.

    It finds mistakes (a restored backup, a deleted directory), not attackers. What rests on it alone is no more
    than that; nonces do not, they have fresh salts as well.

    Args:
        path: The file; a missing one counts as 0.
    """

    rollback_proof = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_count(self) -> int:
        """As `MonotonicCounter` says."""
        return read_number(self._path, "count") or 0

    def increment(self) -> int:
        """As `MonotonicCounter` says."""
        with lock_file(self._path):
            count = self.read_count() + 1
            write_number(self._path, "count", count)
            return count


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Keep other processes from a file, by a lock on a file beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise RollbackError(f"{path}: cannot be locked ({exc.strerror})") from exc
    try:
        _lock_fd(fd, path)
        yield
    finally:
        os.close(fd)


def _lock_fd(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as exc:
        raise RollbackError(f"{path}: cannot be locked ({exc.strerror})") from exc


def read_number(path: Path, key: str) -> int | None:
    """Return the one number that a file holds, or None where there is no file."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
        value: Any = parse_canonical(data)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise RollbackError(f"{path}: cannot be read ({exc.strerror})") from exc
    except ValueError as exc:
        raise RollbackError(f"{path}: {exc}; it is damaged, and no number is guessed") from exc
    if value.keys() != {key} or type(value[key]) is not int or not 0 <= value[key] <= _MAX_COUNT:
        raise RollbackError(f"{path}: expected one number called {key}; it is damaged, and no number is guessed")
    return int(value[key])


def write_number(path: Path, key: str, number: int) -> None:
    """Replace a file by one that holds a number, at once and durably.

    Raises:
        RollbackError: The disk refuses; the old file is still there.
    """
    try:
        replace_file(path, canonical_json({key: number}), 0o600)
    except DiskError as exc:
        raise RollbackError(str(exc)) from exc


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file in the place of an older one, at once and durably.

    Raises:
        DiskError: The disk refuses; the old file is still there.
    """
    fresh = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(fresh, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as exc:
        raise DiskError(f"{path}: cannot be written ({exc.strerror})") from exc
