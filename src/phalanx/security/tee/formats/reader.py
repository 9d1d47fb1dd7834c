"""Strict reading of binary structures: every length is checked, and nothing may follow the end."""

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason


def malformed_error(where: str, what: str) -> RefusedEvidenceError:
    """Build the refusal of something that cannot be read."""
    return RefusedEvidenceError(RefusedEvidenceReason.MALFORMED, f"{where}: {what}")


class ByteReader:
    """A reader of fields from the front of some bytes."""

    def __init__(self, data: bytes, where: str, *, big_endian: bool = False) -> None:
        self._data = data
        self._where = where
        self._order = "big" if big_endian else "little"
        self.position = 0

    @property
    def bytes_left(self) -> int:
        """Number of bytes that have not been read."""
        return len(self._data) - self.position

    def take_bytes(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > self.bytes_left:
            raise malformed_error(self._where, f"ends at byte {len(self._data)}, {size - self.bytes_left} too early")
        start = self.position
        self.position += size
        return self._data[start : self.position]

    def read_unsigned(self, size: int) -> int:
        """Return the next unsigned number of so many bytes."""
        return int.from_bytes(self.take_bytes(size), "big" if self._order == "big" else "little")

    def read_sized(self, size_bytes: int, limit: int) -> bytes:
        """Return the bytes behind a length of so many bytes, which must not be above the limit."""
        size = self.read_unsigned(size_bytes)
        if size > limit:
            raise malformed_error(self._where, f"a length of {size}, allowed {limit}")
        return self.take_bytes(size)

    def skip_zeros(self, size: int, what: str) -> None:
        """Skip bytes that must be zero."""
        if any(self.take_bytes(size)):
            raise malformed_error(self._where, f"{what} must be zero")

    def bytes_since(self, start: int) -> bytes:
        """Return everything between a position and the present one."""
        return self._data[start : self.position]

    def check_end(self) -> None:
        """Check that nothing is left."""
        if self.bytes_left:
            raise malformed_error(self._where, f"{self.bytes_left} bytes after its end")
