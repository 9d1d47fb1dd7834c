"""Intel's provisioning certification key: what its certificate says about the platform.

Source: Intel SGX PCK Certificate and Certificate Revocation List Profile Specification.
"""

from dataclasses import dataclass

from phalanx.security.tee.formats.der import ENUMERATED, OCTET_STRING, OID, SEQUENCE, Der
from phalanx.security.tee.formats.reader import malformed
from phalanx.security.tee.formats.x509 import Certificate

_SGX = "1.2.840.113741.1.13.1"
_TCB, _PCE_ID, _FMSPC, _TYPE = f"{_SGX}.2", f"{_SGX}.3", f"{_SGX}.4", f"{_SGX}.5"
_NUM_COMPONENTS = 16
_PCE_SVN = f"{_TCB}.17"


@dataclass(frozen=True)
class PckFacts:
    """The platform in a PCK certificate.

    Attributes:
        svns: 16 security versions.
        pce_svn: Version of the provisioning certification enclave.
        pce_id: PCE id, 2 bytes.
        fmspc: Family, model, stepping, platform and custom SKU, six bytes.
    """

    svns: bytes
    pce_svn: int
    pce_id: bytes
    fmspc: bytes


def pck_facts(certificate: Certificate) -> PckFacts:
    """Read Intel's extension.

    Raises:
        RefusedEvidenceError: It is absent, or lacks a field.
    """
    place = f"certificate {certificate.name!r}"
    value = certificate.extension(_SGX)
    if value is None:
        raise malformed(place, "has no SGX extension, so it is no PCK certificate")
    fields = _by_oid(Der(value, place), place)
    parts = _by_oid(Der(_find_field(fields, _TCB, SEQUENCE, place), place), place)
    numbers = [_read_number(parts, f"{_TCB}.{index}", place) for index in range(1, _NUM_COMPONENTS + 1)]
    if any(not 0 <= number <= 255 for number in numbers):
        raise malformed(place, "a security version is not in one byte")
    pce_id, fmspc = _find_field(fields, _PCE_ID, OCTET_STRING, place), _find_field(fields, _FMSPC, OCTET_STRING, place)
    _find_field(fields, _TYPE, ENUMERATED, place)
    if len(pce_id) != 2 or len(fmspc) != 6:
        raise malformed(place, "PCE id or FMSPC of another length")
    return PckFacts(bytes(numbers), _read_number(parts, _PCE_SVN, place), pce_id, fmspc)


def _by_oid(holder: Der, where: str) -> dict[str, bytes]:
    """Read SEQUENCE OF SEQUENCE { OID, value } into values, whole, by identifier."""
    items = holder.enter()
    holder.end()
    values: dict[str, bytes] = {}
    while items.more():
        item = items.enter()
        if item.peek() != OID:
            raise malformed(where, "malformed SGX extension")
        oid = item.oid()
        if oid in values:
            raise malformed(where, f"SGX extension has {oid} twice")
        values[oid] = item.any()[2]
        item.end()
    return values


def _find_field(fields: dict[str, bytes], oid: str, tag: int, where: str) -> bytes:
    if oid not in fields:
        raise malformed(where, f"SGX extension lacks {oid}")
    holder = Der(fields[oid], where)
    if tag == SEQUENCE:
        return fields[oid]
    return holder.read(tag)


def _read_number(fields: dict[str, bytes], oid: str, where: str) -> int:
    if oid not in fields:
        raise malformed(where, f"SGX extension lacks {oid}")
    return Der(fields[oid], where).integer()
