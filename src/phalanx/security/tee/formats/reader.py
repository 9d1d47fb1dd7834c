"""Strict reading of binary structures: every length is checked, and nothing may follow the end."""

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.refusal_reason import Reason


def malformed(where: str, what: str) -> RefusedEvidenceError:
    """Build the refusal of something that cannot be read."""
    return RefusedEvidenceError(Reason.MALFORMED, f"{where}: {what}")


class Reader:
    """A reader of fields from the front of some bytes.

    Args:
        where: Name of the data in error messages.
    """

    def __init__(self, data: bytes, where: str, *, big_endian: bool = False) -> None:
        self._data = data
        self._where = where
        self._order = "big" if big_endian else "little"
        self.position = 0

    @property
    def left(self) -> int:
        """Number of bytes that have not been read."""
        return len(self._data) - self.position

    def take(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            RefusedEvidenceError: There are fewer.
        """
        if size > self.left:
            raise malformed(self._where, f"ends at byte {len(self._data)}, {size - self.left} too early")
        start = self.position
        self.position += size
        return self._data[start : self.position]

    def number(self, size: int) -> int:
        """Return the next unsigned number of so many bytes."""
        return int.from_bytes(self.take(size), "big" if self._order == "big" else "little")

    def sized(self, size_bytes: int, limit: int) -> bytes:
        """Return the bytes behind a length of so many bytes, which must not be above the limit."""
        size = self.number(size_bytes)
        if size > limit:
            raise malformed(self._where, f"a length of {size}, allowed {limit}")
        return self.take(size)

    def zeros(self, size: int, what: str) -> None:
        """Skip bytes that must be zero.

        Raises:
            RefusedEvidenceError: One of them is not.
        """
        if any(self.take(size)):
            raise malformed(self._where, f"{what} must be zero")

    def since(self, start: int) -> bytes:
        """Return everything between a position and the present one."""
        return self._data[start : self.position]

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            RefusedEvidenceError: Something is.
        """
        if self.left:
            raise malformed(self._where, f"{self.left} bytes after its end")
