"""NVIDIA's reference manifests (RIM): expected measurements of a driver and a firmware, signed by NVIDIA.

Source: TCG, Reference Integrity Manifest Information Model; ISO/IEC 19770-2 (SWID tags); NVIDIA nvtrust for indexes.
"""

from dataclasses import dataclass

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.x509 import Certificate
from phalanx.security.tee.formats.xml_signature import DSIG, check_signed_document
from phalanx.security.tee.formats.xml_tree import XmlElement, parse_xml
from phalanx.security.tee.nvidia.spdm import SpdmMeasurements
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_SWID = "http://standards.iso.org/iso/19770/-2/2015/schema.xsd"
_HASH = "http://www.w3.org/2001/04/xmlenc#sha384"
_DIGEST_DIGITS, _MAX_ALTERNATIVES, _MAX_INDEX = 96, 16, 253
_DECODER_INDEX = 35
"""Index of the block that measures the video decoder; it says nothing on a GPU with the decoder off."""


@dataclass(frozen=True)
class ReferenceManifest:
    """One manifest with a sound signature.

    Attributes:
        values: Accepted measurements in hex by SPDM block number; of active ones only.
    """

    version: str
    values: dict[int, frozenset[str]]
    path: tuple[Certificate, ...]


def read_manifest(data: bytes, trust: Trust, where: str) -> ReferenceManifest:
    """Read a manifest and check its signer."""
    root = parse_xml(data, where)
    path = check_signed_document(root, trust, where)
    if root.expanded_name != (_SWID, "SoftwareIdentity"):
        raise malformed_error(where, f"is a {root.tag[:40]!r}, expected SoftwareIdentity")
    expected = [(_SWID, "Entity"), (_SWID, "Meta"), (_SWID, "Payload"), (DSIG, "Signature")]
    if [element.expanded_name for element in root.child_elements] != expected:
        raise malformed_error(where, "expected Entity, Meta, Payload and Signature")
    version = root.child_elements[1].attributes.get("colloquialVersion", "")
    if not version:
        raise malformed_error(where, "names no version")
    return ReferenceManifest(version, _read_measurements(root.child_elements[2], where), path)


def _read_measurements(payload: XmlElement, where: str) -> dict[int, frozenset[str]]:
    measurements: dict[int, frozenset[str]] = {}
    seen: set[int] = set()
    for resource in payload.child_elements:
        index = resource.attributes.get("index", "")
        if resource.expanded_name != (_SWID, "Resource") or resource.attributes.get("type") != "Measurement":
            raise malformed_error(where, f"payload holds a {resource.tag[:40]!r} that is no measurement")
        if not index.isascii() or not index.isdecimal() or int(index) > _MAX_INDEX or int(index) in seen:
            raise malformed_error(where, f"measurement {index[:8]!r}: twice, or no number")
        seen.add(int(index))
        if (active := resource.attributes.get("active")) not in ("True", "False"):
            raise malformed_error(where, f"measurement {index}: active is neither True nor False")
        if active == "True":
            measurements[int(index) + 1] = _read_alternatives(resource, index, where)
    if not measurements:
        raise malformed_error(where, "no measurement is active")
    return measurements


def _read_alternatives(resource: XmlElement, index: str, where: str) -> frozenset[str]:
    count = resource.attributes.get("alternatives", "")
    if not count.isascii() or not count.isdecimal() or not 1 <= int(count) <= _MAX_ALTERNATIVES:
        raise malformed_error(where, f"measurement {index}: {count[:8]!r} alternatives")
    values = [resource.find_attribute((_HASH, f"Hash{number}")) or "" for number in range(int(count))]
    if any(len(digest) != _DIGEST_DIGITS or set(digest) - set("0123456789abcdef") for digest in values):
        raise malformed_error(where, f"measurement {index}: a value is not {_DIGEST_DIGITS} lowercase hex digits")
    return frozenset(values)


def check_manifests(report: SpdmMeasurements, driver: ReferenceManifest, firmware: ReferenceManifest) -> None:
    """Compare a report with the manifests of its driver and its firmware.

    Raises:
        RefusedEvidenceError: A manifest is of another version, both speak of one measurement, or one that is active
            is absent or has another value.
    """
    for what, running, manifest in (
        ("driver", report.driver_version, driver),
        ("firmware", report.vbios_version, firmware),
    ):
        if manifest.version.upper() != running.upper():
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_MEASUREMENT,
                f"manifest of {what} {manifest.version[:40]}, the GPU runs {running[:40]}",
            )
    if shared := sorted(set(driver.values) & set(firmware.values)):
        raise malformed_error("manifests", f"both speak of measurement {shared[0]}")
    for block, accepted in sorted({**driver.values, **firmware.values}.items()):
        if block == _DECODER_INDEX + 1 and report.is_decoder_off:
            continue
        value = report.measurements.get(block, b"").hex()
        if value not in accepted:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_MEASUREMENT,
                f"{block} is {f'{value[:16]}...' if value else 'absent'}; NVIDIA's manifest has "
                f"{', '.join(sorted(f'{digest[:16]}...' for digest in accepted))}",
            )
