"""The report of Azure's paravisor (HCL), byte by byte: a hardware report, and the runtime data that it vouches for.

Source: Microsoft, guest attestation of confidential VMs, the attestation report in NV index 0x01400001 of the vTPM.
"""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.reader import ByteReader, malformed_error
from phalanx.security.tee.formats.signature import MIN_RSA_BITS
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_WHERE = "HCL report"
_MAGIC, _VERSIONS, _REQUEST, _SNP, _SHA256 = b"HCLA", (1, 2), 2, 2, 1
_HEADER_BYTES, _HARDWARE_BYTES, _RUNTIME_HEADER_BYTES = 32, 1184, 20
_MAX_BYTES, _MAX_RUNTIME_BYTES = 16 * 1024, 8 * 1024
_ATTESTATION_KEY = "HCLAkPub"


@dataclass(frozen=True)
class HclReport:
    """One report.

    Attributes:
        runtime: The runtime data, JSON of the paravisor; nothing vouches for it before `check_runtime`.
    """

    hardware: bytes
    runtime: bytes


def parse_hcl_report(data: bytes) -> HclReport:
    """Read a report; zeros may follow, for the NV index is of fixed size."""
    if len(data) > _MAX_BYTES:
        raise malformed_error(_WHERE, f"{len(data)} bytes, allowed {_MAX_BYTES}")
    reader = ByteReader(data, _WHERE)
    magic, version, size, request = (
        reader.take_bytes(4),
        reader.read_unsigned(4),
        reader.read_unsigned(4),
        reader.read_unsigned(4),
    )
    if magic != _MAGIC or version not in _VERSIONS or request != _REQUEST:
        raise malformed_error(_WHERE, f"begins with {magic!r}, version {version}, request {request}")
    reader.skip_zeros(_HEADER_BYTES - reader.position, "status and what is reserved")
    hardware = reader.take_bytes(_HARDWARE_BYTES)
    data_size, claims_version, kind, digest, runtime_size = (reader.read_unsigned(4) for _ in range(5))
    if (claims_version, kind, digest) != (1, _SNP, _SHA256):
        raise malformed_error(
            _WHERE, f"runtime data version {claims_version}, report type {kind}, hash {digest}; expected 1, {_SNP}, 1"
        )
    total = _HEADER_BYTES + _HARDWARE_BYTES + data_size
    if runtime_size > _MAX_RUNTIME_BYTES or data_size != _RUNTIME_HEADER_BYTES + runtime_size or size != total:
        raise malformed_error(_WHERE, f"sizes {size}, {data_size} and {runtime_size} do not belong together")
    runtime = reader.take_bytes(runtime_size)
    reader.skip_zeros(reader.bytes_left, "what follows the runtime data")
    return HclReport(hardware, runtime)


def check_runtime(runtime: bytes, report_data: bytes) -> None:
    """Check that the hardware signed the hash of this runtime data, and nothing beside it."""
    expected = hashlib.sha256(runtime).digest().ljust(len(report_data), b"\0")
    if not hmac.compare_digest(expected, report_data):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"{_WHERE}: the hardware report holds another hash than that of the runtime data",
        )


def attestation_key(runtime: bytes) -> rsa.RSAPublicKey:
    """Return the vTPM's attestation key out of runtime data that the hardware vouches for."""
    try:
        value: Any = json.loads(runtime.decode("utf-8"), object_pairs_hook=_no_doubles)
        keys = [key for key in value["keys"] if key["kid"] == _ATTESTATION_KEY]
        if len(keys) != 1 or keys[0]["kty"] != "RSA" or keys[0]["key_ops"] != ["sign"]:
            raise malformed_error(_WHERE, f"its runtime data has not exactly one RSA key {_ATTESTATION_KEY} that signs")
        modulus, exponent = _decode_number(keys[0]["n"]), _decode_number(keys[0]["e"])
        if modulus.bit_length() < MIN_RSA_BITS:
            raise malformed_error(_WHERE, f"a key of {modulus.bit_length()} bits, least {MIN_RSA_BITS}")
        return rsa.RSAPublicNumbers(exponent, modulus).public_key()
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise malformed_error(_WHERE, "its runtime data cannot be read") from exc


def _decode_number(text: str) -> int:
    try:
        return int.from_bytes(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), "big")
    except binascii.Error as exc:
        raise malformed_error(_WHERE, "a number of its key is not base64") from exc


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise malformed_error(_WHERE, "a name twice in its runtime data")
    return dict(pairs)
