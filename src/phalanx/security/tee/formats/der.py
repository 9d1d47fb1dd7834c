"""A strict reader of DER, for certificates, revocation lists and the vendors' own extensions."""

from datetime import UTC, datetime

from phalanx.security.tee.formats.reader import Reader, malformed

BOOLEAN, INTEGER, BIT_STRING, OCTET_STRING, NULL, OID = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06
ENUMERATED, UTF8_STRING, SEQUENCE, SET = 0x0A, 0x0C, 0x30, 0x31
PRINTABLE_STRING, IA5_STRING, UTC_TIME, GENERALIZED_TIME = 0x13, 0x16, 0x17, 0x18
_MAX_LENGTH_BYTES = 3
_MAX_INTEGER_BYTES = 64


class Der:
    """A reader of DER elements from the front of some bytes; only definite, minimal lengths and tags of one byte.

    Args:
        where: Name of the data in error messages.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self._reader = Reader(data, where)
        self._data = data
        self._where = where

    def more(self) -> bool:
        """Whether anything is left."""
        return self._reader.left > 0

    def peek(self) -> int | None:
        """Return the next tag, or None at the end."""
        return self._data[self._reader.position] if self.more() else None

    def any(self) -> tuple[int, bytes, bytes]:
        """Return tag, content and whole encoding of the next element.

        Raises:
            RefusedEvidenceError: It is not DER.
        """
        start = self._reader.position
        tag = self._reader.number(1)
        if tag & 0x1F == 0x1F:
            raise malformed(self._where, "DER tag of more than one byte")
        content = self._reader.take(self._read_length())
        return tag, content, self._reader.since(start)

    def read(self, tag: int) -> bytes:
        """Return the content of the next element, which must have this tag.

        Raises:
            RefusedEvidenceError: It has another one, or is not DER.
        """
        actual, content, _ = self.any()
        if actual != tag:
            raise malformed(self._where, f"DER tag {actual:#04x}, expected {tag:#04x}")
        return content

    def enter(self, tag: int = SEQUENCE) -> "Der":
        """Return a reader of the next element's content."""
        return Der(self.read(tag), self._where)

    def whole(self, tag: int = SEQUENCE) -> bytes:
        """Return the encoding, tag included, of the next element."""
        actual, _, raw = self.any()
        if actual != tag:
            raise malformed(self._where, f"DER tag {actual:#04x}, expected {tag:#04x}")
        return raw

    def integer(self) -> int:
        """Return the next INTEGER."""
        return self.integer_of(self.read(INTEGER))

    def integer_of(self, content: bytes) -> int:
        """Return the number that some content of an INTEGER stands for."""
        if not 1 <= len(content) <= _MAX_INTEGER_BYTES:
            raise malformed(self._where, f"DER integer of {len(content)} bytes")
        if len(content) > 1 and (content[0], content[1] >> 7) in ((0x00, 0), (0xFF, 1)):
            raise malformed(self._where, "DER integer is longer than it must be")
        return int.from_bytes(content, "big", signed=True)

    def boolean(self) -> bool:
        """Return the next BOOLEAN."""
        content = self.read(BOOLEAN)
        if content not in (b"\x00", b"\xff"):
            raise malformed(self._where, "DER boolean is neither 00 nor FF")
        return content == b"\xff"

    def bits(self) -> bytes:
        """Return the next BIT STRING, which must hold whole bytes."""
        content = self.read(BIT_STRING)
        if not content or content[0] != 0:
            raise malformed(self._where, "DER bit string does not hold whole bytes")
        return content[1:]

    def oid(self) -> str:
        """Return the next OBJECT IDENTIFIER in dotted form."""
        return self._dotted_oid(self.read(OID))

    def time(self) -> datetime:
        """Return the next UTCTime or GeneralizedTime, in the one form of RFC 5280."""
        tag, content, _ = self.any()
        form = {UTC_TIME: "%y%m%d%H%M%SZ", GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
        size = 13 if tag == UTC_TIME else 15
        if form is None or len(content) != size or not content[:-1].isdigit() or content[-1:] != b"Z":
            raise malformed(self._where, "malformed time")
        text = content.decode("ascii")
        # RFC 5280, 4.1.2.5.1: two digits below 50 are of this century
        if tag == UTC_TIME:
            form, text = "%Y%m%d%H%M%SZ", ("20" if int(text[:2]) < 50 else "19") + text
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError as exc:
            raise malformed(self._where, "malformed time") from exc

    def end(self) -> None:
        """Check that nothing is left."""
        self._reader.end()

    def _read_length(self) -> int:
        first = self._reader.number(1)
        if first < 0x80:
            return first
        size = first & 0x7F
        if not 1 <= size <= _MAX_LENGTH_BYTES:
            raise malformed(self._where, "DER length is indefinite or too long")
        content = self._reader.take(size)
        length = int.from_bytes(content, "big")
        if content[0] == 0 or length < 0x80:
            raise malformed(self._where, "DER length is longer than it must be")
        return length

    def _dotted_oid(self, content: bytes) -> str:
        if not content or content[-1] & 0x80 or len(content) > 32:
            raise malformed(self._where, "malformed object identifier")
        arcs, value, fresh = [], 0, True
        for byte in content:
            if fresh and byte == 0x80:
                raise malformed(self._where, "object identifier is longer than it must be")
            value, fresh = value << 7 | byte & 0x7F, not byte & 0x80
            if fresh:
                arcs.append(value)
                value = 0
        first = min(arcs[0] // 40, 2)
        return ".".join(str(arc) for arc in (first, arcs[0] - 40 * first, *arcs[1:]))
