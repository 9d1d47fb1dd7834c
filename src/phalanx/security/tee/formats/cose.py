"""COSE_Sign1: one payload, one signature, nothing unprotected.

Source: RFC 9052, section 4.2.
"""

from dataclasses import dataclass
from typing import Any

from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor
from phalanx.security.tee.formats.reader import malformed_error

ALGORITHM = 1
ES384, EDDSA = -35, -8


@dataclass(frozen=True)
class Sign1:
    """One signed message, parsed and not verified."""

    algorithm: int
    payload: bytes
    signature: bytes
    signed: bytes


def parse_sign1(data: bytes, where: str) -> Sign1:
    """Read a COSE_Sign1, tagged or not, with its protected algorithm as the only header."""
    value = decode_cbor(data, where)
    if not isinstance(value, list) or [type(item) for item in value] != [bytes, dict, bytes, bytes]:
        raise malformed_error(where, "is no COSE_Sign1 of protected header, unprotected header, payload and signature")
    protected, unprotected, payload, signature = value
    header: Any = decode_cbor(protected, where)
    if unprotected or not isinstance(header, dict) or set(header) != {ALGORITHM}:
        raise malformed_error(where, "expected the algorithm as its only header")
    algorithm = header[ALGORITHM]
    if isinstance(algorithm, bool) or not isinstance(algorithm, int):
        raise malformed_error(where, "names no algorithm")
    return Sign1(algorithm, payload, signature, to_be_signed(protected, payload))


def to_be_signed(protected: bytes, payload: bytes) -> bytes:
    """Return the Sig_structure of a message without external data."""
    return encode_cbor(["Signature1", protected, b"", payload])
