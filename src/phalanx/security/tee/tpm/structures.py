"""TPM 2.0 structures, byte by byte: quotes, signatures and public areas.

Source: TCG, Trusted Platform Module Library, part 2 (Structures).
"""

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec, rsa

from phalanx.security.tee.formats.reader import ByteReader, malformed_error
from phalanx.security.tee.formats.signature import MIN_RSA_BITS, PublicKey

MAGIC, QUOTE = 0xFF544347, 0x8018
RSA, ECC, NULL = 0x0001, 0x0023, 0x0010
RSASSA, RSAPSS, ECDSA = 0x0014, 0x0016, 0x0018
HASHES = {0x0004: "sha1", 0x000B: "sha256", 0x000C: "sha384", 0x000D: "sha512"}
_CURVES: dict[int, ec.EllipticCurve] = {0x0003: ec.SECP256R1(), 0x0004: ec.SECP384R1(), 0x0005: ec.SECP521R1()}
FIXED_TPM, FIXED_PARENT, SENSITIVE_DATA_ORIGIN = 1 << 1, 1 << 4, 1 << 5
RESTRICTED, DECRYPT, SIGN = 1 << 16, 1 << 17, 1 << 18
_MAX_BYTES = 1024
_MAX_BANKS, _MAX_SELECT_BYTES = 8, 4


@dataclass(frozen=True)
class TpmQuote:
    """TPMS_ATTEST of a quote.

    Attributes:
        extra_data: Data that the verifier had the TPM sign.
        restart_count: Number of restarts since the last reset.
        safe: Whether the TPM's clock is known not to have gone back.
        firmware: Version, of the vendor's own form.
        selection: Banks and their PCR numbers, in order.
    """

    signer: bytes
    extra_data: bytes
    reset_count: int
    restart_count: int
    safe: bool
    firmware: int
    selection: tuple[tuple[str, tuple[int, ...]], ...]
    digest: bytes


@dataclass(frozen=True)
class TpmSignature:
    """TPMT_SIGNATURE.

    Attributes:
        scheme: `RSASSA`, `RSAPSS` or `ECDSA`.
        parts: One number as bytes for RSA, r and s for ECDSA.
    """

    scheme: int
    hash: str
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class TpmPublic:
    """TPMT_PUBLIC of a signing key.

    Attributes:
        name: Name of the object, hash algorithm included: what credentials are made for.
    """

    attributes: int
    key: PublicKey
    name: bytes


def parse_quote_and_signature(data: bytes) -> tuple[bytes, TpmQuote, TpmSignature]:
    """Read TPM2B_ATTEST followed by TPMT_SIGNATURE.

    Returns:
        What is signed, the same parsed, and the signature.
    """
    reader = ByteReader(data, "TPM evidence", big_endian=True)
    signed = reader.read_sized(2, _MAX_BYTES)
    signature = _read_signature(reader)
    reader.check_end()
    return signed, _parse_quote(signed), signature


def _parse_quote(data: bytes) -> TpmQuote:
    reader = ByteReader(data, "TPMS_ATTEST", big_endian=True)
    magic, kind = reader.read_unsigned(4), reader.read_unsigned(2)
    if magic != MAGIC:
        raise malformed_error("TPMS_ATTEST", f"magic {magic:#x}: this was not made inside a TPM")
    if kind != QUOTE:
        raise malformed_error("TPMS_ATTEST", f"type {kind:#x}, expected {QUOTE:#x} (quote)")
    signer, extra_data = reader.read_sized(2, 66), reader.read_sized(2, 66)
    reader.take_bytes(8)
    reset_count, restart_count, safe = reader.read_unsigned(4), reader.read_unsigned(4), reader.read_unsigned(1)
    if safe > 1:
        raise malformed_error("TPMS_ATTEST", "safe is neither 0 nor 1")
    firmware = reader.read_unsigned(8)
    selection = _read_selection(reader)
    digest = reader.read_sized(2, 64)
    reader.check_end()
    return TpmQuote(signer, extra_data, reset_count, restart_count, bool(safe), firmware, selection, digest)


def _read_selection(reader: ByteReader) -> tuple[tuple[str, tuple[int, ...]], ...]:
    count = reader.read_unsigned(4)
    if count > _MAX_BANKS:
        raise malformed_error("TPMS_ATTEST", f"{count} PCR banks, allowed {_MAX_BANKS}")
    banks = []
    for _ in range(count):
        name = _read_hash(reader, "TPMS_ATTEST")
        bits = int.from_bytes(reader.read_sized(1, _MAX_SELECT_BYTES), "little")
        banks.append((name, tuple(index for index in range(32) if bits >> index & 1)))
    if len({name for name, _ in banks}) != len(banks):
        raise malformed_error("TPMS_ATTEST", "a PCR bank twice")
    return tuple(banks)


def _read_signature(reader: ByteReader) -> TpmSignature:
    scheme = reader.read_unsigned(2)
    if scheme not in (RSASSA, RSAPSS, ECDSA):
        raise malformed_error("TPMT_SIGNATURE", f"scheme {scheme:#x} is not accepted")
    name = _read_hash(reader, "TPMT_SIGNATURE")
    count = 2 if scheme == ECDSA else 1
    return TpmSignature(scheme, name, tuple(reader.read_sized(2, 512) for _ in range(count)))


def parse_public(data: bytes) -> TpmPublic:
    """Read TPMT_PUBLIC of an RSA or ECC key."""
    place = "TPMT_PUBLIC"
    reader = ByteReader(data, place, big_endian=True)
    kind, name_hash = reader.read_unsigned(2), reader.read_unsigned(2)
    if name_hash not in HASHES or kind not in (RSA, ECC):
        raise malformed_error(place, f"type {kind:#x} with name algorithm {name_hash:#x}")
    attributes = reader.read_unsigned(4)
    reader.read_sized(2, 64)
    if reader.read_unsigned(2) != NULL:
        # a symmetric algorithm: a storage key, such as the EK
        reader.take_bytes(4)
    if reader.read_unsigned(2) != NULL:
        _read_hash(reader, place)
    key = _rsa_key(reader, place) if kind == RSA else _ecc_key(reader, place)
    reader.check_end()
    name = name_hash.to_bytes(2, "big") + hashlib.new(HASHES[name_hash], data).digest()
    return TpmPublic(attributes, key, name)


def _rsa_key(reader: ByteReader, where: str) -> rsa.RSAPublicKey:
    bits, exponent = reader.read_unsigned(2), reader.read_unsigned(4) or 65537
    modulus = reader.read_sized(2, 512)
    number = int.from_bytes(modulus, "big")
    if number.bit_length() != bits or bits < MIN_RSA_BITS:
        raise malformed_error(where, f"RSA key of {number.bit_length()} bits, says {bits}, least {MIN_RSA_BITS}")
    try:
        return rsa.RSAPublicNumbers(exponent, number).public_key()
    except ValueError as exc:
        raise malformed_error(where, "is no RSA key") from exc


def _ecc_key(reader: ByteReader, where: str) -> ec.EllipticCurvePublicKey:
    curve = _CURVES.get(reader.read_unsigned(2))
    if reader.read_unsigned(2) != NULL:
        _read_hash(reader, where)
    x, y = reader.read_sized(2, 66), reader.read_sized(2, 66)
    if curve is None:
        raise malformed_error(where, "a curve that is not accepted")
    try:
        numbers = ec.EllipticCurvePublicNumbers(int.from_bytes(x, "big"), int.from_bytes(y, "big"), curve)
        return numbers.public_key()
    except ValueError as exc:
        raise malformed_error(where, "is no point of its curve") from exc


def _read_hash(reader: ByteReader, where: str) -> str:
    number = reader.read_unsigned(2)
    if number not in HASHES:
        raise malformed_error(where, f"hash {number:#x}")
    return HASHES[number]
