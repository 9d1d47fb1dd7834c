"""The store of a pad ledger: replaced as a whole, on the disk before it is relied on, open in one process."""

import fcntl
import os
from pathlib import Path
from typing import Protocol

from phalanx.errors import PadError

MOST_BYTES = 64 * 1024


class LedgerStore(Protocol):
    """One small record that outlives the process."""

    def read(self) -> bytes | None:
        """Return what was written last; None if nothing ever was."""
        ...

    def write(self, data: bytes) -> None:
        """Replace the record; when this returns, a crash of the machine does not undo it.

        Raises:
            PadError: The disk refuses.
        """
        ...


class FileStore:
    """A record in a file, replaced by renaming; a lock beside it keeps other processes out.

    Args:
        path: The file; its directory is created where missing.

    Raises:
        PadError: It cannot be opened, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise PadError(f"{path}: cannot be opened ({exc.strerror})") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock)
            raise PadError(f"{path}: another process has it open; two could use the same pads") from exc

    def read(self) -> bytes | None:
        """As `LedgerStore` says.

        Raises:
            PadError: The file cannot be read, or is over-long.
        """
        try:
            with self._path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise PadError(f"{self._path}: cannot be read ({exc.strerror})") from exc
        if len(data) > MOST_BYTES:
            raise PadError(f"{self._path}: has more than {MOST_BYTES} bytes, so it is no pad ledger")
        return data

    def write(self, data: bytes) -> None:
        """As `LedgerStore` says."""
        new = self._path.with_name(self._path.name + ".writing")
        try:
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
            self._force_directory()
        except OSError as exc:
            raise PadError(f"{self._path}: cannot be written ({exc.strerror}); no pad is used without it") from exc

    def close(self) -> None:
        """Let another process open it."""
        os.close(self._lock)

    def _force_directory(self) -> None:
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
