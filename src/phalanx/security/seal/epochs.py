"""Epochs: a number for each start, persisted before anything is sealed under it.

The epoch is the value of the counter after it was raised. The file beside it holds the epoch that is about to be taken,
so that a counter that went back is noticed, and a file that did. The state after a crash is derived from both:

    file = counter        nothing was going on
    file = counter + 1    a crash between the two writes; that epoch is given up, never used
    file < counter        the file was turned back
    file > counter + 1    the counter was turned back
"""

from pathlib import Path
from typing import Protocol

from phalanx.errors import RollbackError
from phalanx.security.crypto import MonotonicCounter, lock_file, read_number, write_number
from phalanx.security.seal.direction import MAX_EPOCH

_KEY = "epoch"


class EpochSource(Protocol):
    """A source of epochs for one party."""

    def raise_epoch(self) -> int:
        """Return an epoch that was never given before."""


class EpochStore:
    """The epochs of one party, in a file and a counter.

    Args:
        path: The file that `create` made.

    Guarantees:
        With a counter that cannot be turned back no epoch is given twice, whatever happens to the file, and whenever a
        process dies. With one that can, a file or counter that was turned back alone is refused; both turned
        back together are not found out here, and fresh salts keep the keys apart then.
    """

    def __init__(self, path: Path, counter: MonotonicCounter) -> None:
        self._path, self._counter = path, counter

    @classmethod
    def create(cls, path: Path, counter: MonotonicCounter) -> "EpochStore":
        """Begin; only when a party is set up, for a missing file is otherwise a sign of rollback."""
        with lock_file(path):
            if read_number(path, _KEY) is not None:
                raise RollbackError(f"{path}: exists already; a party is set up once")
            write_number(path, _KEY, counter.read_count())
        return cls(path, counter)

    def raise_epoch(self) -> int:
        """As `EpochSource` says: call it at each start and at each handshake, before anything is sealed.

        Returns:
            From 1 to 2^32 - 1, higher than each one before.

        Raises:
            RollbackError: File or counter went back, are damaged, are used by another process, or at their end.
        """
        with lock_file(self._path):
            epoch = self._settle_epoch() + 1
            if epoch > MAX_EPOCH:
                raise RollbackError(
                    f"{self._path}: epoch {epoch} is beyond {MAX_EPOCH}; begin a new session and counter"
                )
            write_number(self._path, _KEY, epoch)
            self._move_to(epoch)
            return epoch

    def _settle_epoch(self) -> int:
        """Return where both stand, after giving up an epoch that a crash left half-taken."""
        epoch, count = read_number(self._path, _KEY), self._counter.read_count()
        if epoch is None:
            raise RollbackError(f"{self._path}: is missing; it was deleted, or this party was never set up")
        if epoch < count:
            raise RollbackError(
                f"{self._path}: is of epoch {epoch}, the counter of {count}: an older file was put back"
            )
        if epoch > count + 1:
            raise RollbackError(
                f"{self._path}: is of epoch {epoch}, the counter of {count}: the counter was turned back"
            )
        if epoch == count + 1:
            self._move_to(epoch)
        return epoch

    def _move_to(self, epoch: int) -> None:
        count = self._counter.increment()
        if count != epoch:
            raise RollbackError(f"{self._path}: the counter went to {count}, expected {epoch}: somebody else moves it")
