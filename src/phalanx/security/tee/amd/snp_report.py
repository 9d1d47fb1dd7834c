"""The attestation report of AMD SEV-SNP, byte by byte.

Source: AMD, SEV Secure Nested Paging Firmware ABI Specification (56860), table ATTESTATION_REPORT.
"""

from dataclasses import dataclass

from phalanx.security.tee.formats.reader import ByteReader, malformed_error

REPORT_BYTES = 1184
SIGNED_BYTES = 0x2A0
VERSIONS = (2, 3, 5)
VCEK, VLEK = 0, 1
_ECDSA_P384_SHA384 = 1
_WHERE = "SNP report"
# bytes of a TCB_VERSION by name; the order is that of the product, the rest is reserved
_TCB_LAYOUT = {
    "Milan": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Genoa": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Turin": {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7},
}


@dataclass(frozen=True)
class SnpReport:
    """One report.

    Attributes:
        policy: Bits of the guest's policy.
        vmpl: Privilege level that asked for the report, 0 the highest.
        signing_key: `VCEK` or `VLEK`.
        mask_chip_key: Whether the chip's own key was withheld from signing.
        report_data: 64 bytes that the guest chose.
        fields: Hex by name, for reference values.
        tcbs: Raw TCB versions by name: ``current``, ``reported``, ``committed``, ``launch``.
        chip_id: 64 bytes, zeros if masked.
        family_model: CPUID family and model; None in version 2.
    """

    version: int
    policy: int
    vmpl: int
    signing_key: int
    mask_chip_key: bool
    report_data: bytes
    fields: dict[str, str]
    tcbs: dict[str, bytes]
    chip_id: bytes
    family_model: tuple[int, int] | None
    signed: bytes
    r: int
    s: int


def parse_report(data: bytes) -> SnpReport:
    """Read a report.

    Raises:
        RefusedEvidenceError: Wrong size, version or algorithm, or a byte of the signature field that must be zero.
    """
    if len(data) != REPORT_BYTES:
        raise malformed_error(_WHERE, f"{len(data)} bytes, expected {REPORT_BYTES}")
    reader = ByteReader(data, _WHERE)
    version = reader.read_unsigned(4)
    if version not in VERSIONS:
        raise malformed_error(_WHERE, f"version {version}, known: {', '.join(map(str, VERSIONS))}")
    fields = {"guest_svn": reader.take_bytes(4)}
    policy = reader.read_unsigned(8)
    fields["family_id"], fields["image_id"] = reader.take_bytes(16), reader.take_bytes(16)
    vmpl = reader.read_unsigned(4)
    algorithm = reader.read_unsigned(4)
    if algorithm != _ECDSA_P384_SHA384:
        raise malformed_error(_WHERE, f"signature algorithm {algorithm}, expected 1 (ECDSA P-384 with SHA-384)")
    tcbs = {"current": reader.take_bytes(8)}
    reader.take_bytes(8)
    flags = reader.read_unsigned(4)
    reader.take_bytes(4)
    report_data = reader.take_bytes(64)
    for name, size in (("launch", 48), ("host_data", 32), ("id_key_digest", 48), ("author_key_digest", 48)):
        fields[name] = reader.take_bytes(size)
    fields["report_id"], fields["report_id_ma"] = reader.take_bytes(32), reader.take_bytes(32)
    tcbs["reported"] = reader.take_bytes(8)
    family, model = reader.read_unsigned(1), reader.read_unsigned(1)
    reader.take_bytes(22)
    chip_id = reader.take_bytes(64)
    tcbs["committed"] = reader.take_bytes(8)
    reader.take_bytes(8)
    tcbs["launch"] = reader.take_bytes(8)
    reader.take_bytes(SIGNED_BYTES - reader.position)
    r, s = _read_signature(reader)
    return SnpReport(
        version=version,
        policy=policy,
        vmpl=vmpl,
        signing_key=flags >> 2 & 0x7,
        mask_chip_key=bool(flags & 0x2),
        report_data=report_data,
        fields={name: value.hex() for name, value in fields.items()},
        tcbs=tcbs,
        chip_id=chip_id,
        family_model=None if version == 2 else (family, model),
        signed=data[:SIGNED_BYTES],
        r=r,
        s=s,
    )


def _read_signature(reader: ByteReader) -> tuple[int, int]:
    """Read r and s: 48 bytes each in fields of 72, least significant first; all else in the field is zero."""
    r = int.from_bytes(reader.take_bytes(48), "little")
    reader.skip_zeros(24, "the rest of r")
    s = int.from_bytes(reader.take_bytes(48), "little")
    reader.skip_zeros(24, "the rest of s")
    reader.skip_zeros(REPORT_BYTES - reader.position, "the rest of the signature field")
    reader.check_end()
    return r, s


def decode_tcb(raw: bytes, product: str) -> dict[str, int]:
    """Return the versions in a TCB_VERSION by name."""
    return {name: raw[offset] for name, offset in _TCB_LAYOUT[product].items()}


def product_of(family_model: tuple[int, int]) -> str | None:
    """Return the product that a CPU belongs to, by CPUID family and model; None if it is not known."""
    family, model = family_model
    if family == 0x19 and model <= 0x0F:
        return "Milan"
    if family == 0x19 and (0x10 <= model <= 0x1F or 0xA0 <= model <= 0xAF):
        return "Genoa"
    if family == 0x1A and model <= 0x1F:
        return "Turin"
    return None


def known_products() -> tuple[str, ...]:
    """Return the products with a known TCB layout."""
    return tuple(_TCB_LAYOUT)
