"""Intel's provisioning certification key: what its certificate says about the platform.

Source: Intel SGX PCK Certificate and Certificate Revocation List Profile Specification.
"""

from dataclasses import dataclass

from phalanx.security.tee.formats.der import ENUMERATED, OCTET_STRING, OID, SEQUENCE, DerReader
from phalanx.security.tee.formats.reader import malformed_error
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
    """Read Intel's extension."""
    place = f"certificate {certificate.subject_name!r}"
    value = certificate.find_extension(_SGX)
    if value is None:
        raise malformed_error(place, "has no SGX extension, so it is no PCK certificate")
    fields = _values_by_oid(DerReader(value, place), place)
    parts = _values_by_oid(DerReader(_find_field(fields, _TCB, SEQUENCE, place), place), place)
    numbers = [_read_number(parts, f"{_TCB}.{index}", place) for index in range(1, _NUM_COMPONENTS + 1)]
    if any(not 0 <= number <= 255 for number in numbers):
        raise malformed_error(place, "a security version is not in one byte")
    pce_id, fmspc = _find_field(fields, _PCE_ID, OCTET_STRING, place), _find_field(fields, _FMSPC, OCTET_STRING, place)
    _find_field(fields, _TYPE, ENUMERATED, place)
    if len(pce_id) != 2 or len(fmspc) != 6:
        raise malformed_error(place, "PCE id or FMSPC of another length")
    return PckFacts(bytes(numbers), _read_number(parts, _PCE_SVN, place), pce_id, fmspc)


def _values_by_oid(holder: DerReader, where: str) -> dict[str, bytes]:
    """Read SEQUENCE OF SEQUENCE { OID, value } into values, whole, by identifier."""
    items = holder.enter_element()
    holder.check_end()
    values: dict[str, bytes] = {}
    while items.has_more():
        item = items.enter_element()
        if item.peek_tag() != OID:
            raise malformed_error(where, "malformed SGX extension")
        oid = item.read_oid()
        if oid in values:
            raise malformed_error(where, f"SGX extension has {oid} twice")
        values[oid] = item.read_element()[2]
        item.check_end()
    return values


def _find_field(fields: dict[str, bytes], oid: str, tag: int, where: str) -> bytes:
    if oid not in fields:
        raise malformed_error(where, f"SGX extension lacks {oid}")
    holder = DerReader(fields[oid], where)
    if tag == SEQUENCE:
        return fields[oid]
    return holder.read_content(tag)


def _read_number(fields: dict[str, bytes], oid: str, where: str) -> int:
    if oid not in fields:
        raise malformed_error(where, f"SGX extension lacks {oid}")
    return DerReader(fields[oid], where).read_integer()
