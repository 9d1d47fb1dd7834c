"""A signed SPDM 1.1 MEASUREMENTS exchange, byte by byte, and NVIDIA's own fields in it.

Source: DMTF DSP0274 version 1.1 (SPDM), GET_MEASUREMENTS and MEASUREMENTS; NVIDIA nvtrust for opaque data.
"""

from dataclasses import dataclass

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.reader import ByteReader, malformed_error

REQUEST_BYTES, SIGNATURE_BYTES, NONCE_BYTES = 37, 96, 32
MAX_REPORT_BYTES = 64 * 1024
_WHERE = "SPDM measurements"
_VERSION_1_1 = 0x11
_GET_MEASUREMENTS, _MEASUREMENTS = 0xE0, 0x60
_WITH_SIGNATURE, _ALL = 0x01, 0xFF
_DMTF = 0x01
_MAX_BLOCKS = 254
_DRIVER_VERSION, _VBIOS_VERSION, _DECODER, _FWID = 3, 6, 11, 20
_DECODER_OFF = b"\x55"


@dataclass(frozen=True)
class SpdmMeasurements:
    """One request and its response.

    Attributes:
        measurements: Values by block number; the first byte, the kind of value, is apart.
        signature: r and s, 96 bytes.
    """

    nonce: bytes
    measurements: dict[int, bytes]
    opaque: dict[int, bytes]
    signed: bytes
    signature: bytes

    @property
    def driver_version(self) -> str:
        """Version of the driver that the GPU was set up by."""
        return self.opaque.get(_DRIVER_VERSION, b"").rstrip(b"\0").decode("ascii", "replace")

    @property
    def vbios_version(self) -> str:
        """Version of the firmware: five bytes, written as NVIDIA writes them, such as 96.00.5E.00.01."""
        raw = self.opaque.get(_VBIOS_VERSION, b"")
        if len(raw) != 8:
            return ""
        # little-endian: the high four bytes of the version, then one more from the other half
        digits = raw[3::-1].hex().upper() + raw[4:5].hex().upper()
        return ".".join(digits[index : index + 2] for index in range(0, len(digits), 2))

    @property
    def is_decoder_off(self) -> bool:
        """Whether the GPU says that its first video decoder is off."""
        return self.opaque.get(_DECODER, b"")[:1] == _DECODER_OFF

    @property
    def firmware_id(self) -> bytes:
        """Identity of the firmware that made the signing key; empty where the GPU does not say."""
        return self.opaque.get(_FWID, b"")


def parse_measurements(data: bytes) -> SpdmMeasurements:
    """Read a request for all measurements with a signature, followed by its response; zeros may come behind it.

    Raises:
        RefusedEvidenceError: Anything else, SPDM 1.2 and later included: their signature covers messages that are
            not in the report.
    """
    if len(data) > MAX_REPORT_BYTES:
        raise malformed_error(_WHERE, f"{len(data)} bytes, allowed {MAX_REPORT_BYTES}")
    reader = ByteReader(data, _WHERE)
    nonce = _read_request(reader)
    version, code = reader.read_unsigned(1), reader.read_unsigned(1)
    if (version, code) != (_VERSION_1_1, _MEASUREMENTS):
        raise malformed_error(_WHERE, f"response {code:#x} of version {version:#x}, expected 0x60 of 0x11")
    reader.take_bytes(2)
    count = reader.read_unsigned(1)
    record = ByteReader(reader.read_sized(3, MAX_REPORT_BYTES), _WHERE)
    measurements = _read_blocks(record, count)
    reader.take_bytes(NONCE_BYTES)
    opaque = _read_opaque(ByteReader(reader.read_sized(2, MAX_REPORT_BYTES), _WHERE))
    signed = reader.bytes_since(0)
    signature = reader.take_bytes(SIGNATURE_BYTES)
    # drivers hand reports over in a buffer that may be longer; what is signed ends before
    reader.skip_zeros(reader.bytes_left, "what follows the signature")
    return SpdmMeasurements(nonce, measurements, opaque, signed, signature)


def without_padding(data: bytes) -> bytes:
    """Cut a report at the end of its signature; other bytes are returned unchanged, for the appraiser to refuse."""
    try:
        report = parse_measurements(data)
    except RefusedEvidenceError:
        return data
    return data[: len(report.signed) + len(report.signature)]


def _read_request(reader: ByteReader) -> bytes:
    version, code, attributes, operation = reader.take_bytes(4)
    if (version, code) != (_VERSION_1_1, _GET_MEASUREMENTS):
        raise malformed_error(_WHERE, f"request {code:#x} of version {version:#x}, expected 0xe0 of 0x11")
    if attributes != _WITH_SIGNATURE or operation != _ALL:
        raise malformed_error(_WHERE, "the request was not for all measurements with a signature")
    nonce = reader.take_bytes(NONCE_BYTES)
    reader.take_bytes(1)
    return nonce


def _read_blocks(reader: ByteReader, count: int) -> dict[int, bytes]:
    blocks: dict[int, bytes] = {}
    for _ in range(count):
        index, specification = reader.read_unsigned(1), reader.read_unsigned(1)
        block = ByteReader(reader.read_sized(2, MAX_REPORT_BYTES), _WHERE)
        if specification != _DMTF or not 1 <= index <= _MAX_BLOCKS or index in blocks:
            raise malformed_error(_WHERE, f"measurement {index}: twice, or not in the DMTF's form")
        block.take_bytes(1)
        blocks[index] = block.read_sized(2, MAX_REPORT_BYTES)
        block.check_end()
    reader.check_end()
    if not blocks:
        raise malformed_error(_WHERE, "no measurement")
    return blocks


def _read_opaque(reader: ByteReader) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    while reader.bytes_left:
        kind = reader.read_unsigned(2)
        if kind in fields and kind in (_DRIVER_VERSION, _VBIOS_VERSION, _DECODER, _FWID):
            raise malformed_error(_WHERE, f"opaque field {kind} twice")
        fields[kind] = reader.read_sized(2, MAX_REPORT_BYTES)
    return fields
