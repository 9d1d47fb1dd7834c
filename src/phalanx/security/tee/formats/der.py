"""A strict reader of DER, for certificates, revocation lists and the vendors' own extensions."""

from datetime import UTC, datetime

from phalanx.security.tee.formats.reader import ByteReader, malformed_error

BOOLEAN, INTEGER, BIT_STRING, OCTET_STRING, NULL, OID = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06
ENUMERATED, SEQUENCE, SET = 0x0A, 0x30, 0x31
PRINTABLE_STRING, IA5_STRING, UTC_TIME, GENERALIZED_TIME = 0x13, 0x16, 0x17, 0x18
_MAX_LENGTH_BYTES = 3
_MAX_INTEGER_BYTES = 64


class DerReader:
    """A reader of DER elements from the front of some bytes; only definite, minimal lengths and tags of one byte."""

    def __init__(self, data: bytes, where: str) -> None:
        self._reader = ByteReader(data, where)
        self._data = data
        self._where = where

    def has_more(self) -> bool:
        """Whether anything is left."""
        return self._reader.bytes_left > 0

    def peek_tag(self) -> int | None:
        """Return the next tag, or None at the end."""
        return self._data[self._reader.position] if self.has_more() else None

    def read_element(self) -> tuple[int, bytes, bytes]:
        """Return tag, content and whole encoding of the next element."""
        start = self._reader.position
        tag = self._reader.read_unsigned(1)
        if tag & 0x1F == 0x1F:
            raise malformed_error(self._where, "DER tag of more than one byte")
        content = self._reader.take_bytes(self._read_length())
        return tag, content, self._reader.bytes_since(start)

    def read_content(self, tag: int) -> bytes:
        """Return the content of the next element, which must have this tag."""
        actual, content, _ = self.read_element()
        if actual != tag:
            raise malformed_error(self._where, f"DER tag {actual:#04x}, expected {tag:#04x}")
        return content

    def enter_element(self, tag: int = SEQUENCE) -> "DerReader":
        """Return a reader of the next element's content."""
        return DerReader(self.read_content(tag), self._where)

    def read_encoding(self, tag: int = SEQUENCE) -> bytes:
        """Return the encoding, tag included, of the next element."""
        actual, _, raw = self.read_element()
        if actual != tag:
            raise malformed_error(self._where, f"DER tag {actual:#04x}, expected {tag:#04x}")
        return raw

    def read_integer(self) -> int:
        """Return the next INTEGER."""
        return self.parse_integer(self.read_content(INTEGER))

    def parse_integer(self, content: bytes) -> int:
        """Return the number that some content of an INTEGER stands for."""
        if not 1 <= len(content) <= _MAX_INTEGER_BYTES:
            raise malformed_error(self._where, f"DER integer of {len(content)} bytes")
        if len(content) > 1 and (content[0], content[1] >> 7) in ((0x00, 0), (0xFF, 1)):
            raise malformed_error(self._where, "DER integer is longer than it must be")
        return int.from_bytes(content, "big", signed=True)

    def read_boolean(self) -> bool:
        """Return the next BOOLEAN."""
        content = self.read_content(BOOLEAN)
        if content not in (b"\x00", b"\xff"):
            raise malformed_error(self._where, "DER boolean is neither 00 nor FF")
        return content == b"\xff"

    def read_bits(self) -> bytes:
        """Return the next BIT STRING, which must hold whole bytes."""
        content = self.read_content(BIT_STRING)
        if not content or content[0] != 0:
            raise malformed_error(self._where, "DER bit string does not hold whole bytes")
        return content[1:]

    def read_oid(self) -> str:
        """Return the next OBJECT IDENTIFIER in dotted form."""
        return self._dotted_oid(self.read_content(OID))

    def read_time(self) -> datetime:
        """Return the next UTCTime or GeneralizedTime, in the one form of RFC 5280."""
        tag, content, _ = self.read_element()
        form = {UTC_TIME: "%y%m%d%H%M%SZ", GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
        size = 13 if tag == UTC_TIME else 15
        if form is None or len(content) != size or not content[:-1].isdigit() or content[-1:] != b"Z":
            raise malformed_error(self._where, "malformed time")
        text = content.decode("ascii")
        # RFC 5280, 4.1.2.5.1: two digits below 50 are of this century
        if tag == UTC_TIME:
            form, text = "%Y%m%d%H%M%SZ", ("20" if int(text[:2]) < 50 else "19") + text
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError as exc:
            raise malformed_error(self._where, "malformed time") from exc

    def check_end(self) -> None:
        """Check that nothing is left."""
        self._reader.check_end()

    def _read_length(self) -> int:
        first = self._reader.read_unsigned(1)
        if first < 0x80:
            return first
        size = first & 0x7F
        if not 1 <= size <= _MAX_LENGTH_BYTES:
            raise malformed_error(self._where, "DER length is indefinite or too long")
        content = self._reader.take_bytes(size)
        length = int.from_bytes(content, "big")
        if content[0] == 0 or length < 0x80:
            raise malformed_error(self._where, "DER length is longer than it must be")
        return length

    def _dotted_oid(self, content: bytes) -> str:
        if not content or content[-1] & 0x80 or len(content) > 32:
            raise malformed_error(self._where, "malformed object identifier")
        arcs, value, fresh = [], 0, True
        for byte in content:
            if fresh and byte == 0x80:
                raise malformed_error(self._where, "object identifier is longer than it must be")
            value, fresh = value << 7 | byte & 0x7F, not byte & 0x80
            if fresh:
                arcs.append(value)
                value = 0
        first = min(arcs[0] // 40, 2)
        return ".".join(str(arc) for arc in (first, arcs[0] - 40 * first, *arcs[1:]))
