"""NVIDIA GPUs in confidential mode: a signed SPDM report with the GPU's own certificate chain.

Source: DMTF DSP0274 1.1; TCG DICE Attestation Architecture; NVIDIA nvtrust.
"""

from collections.abc import Mapping
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric import ec

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust, check_chain, check_signs_data, first_end
from phalanx.security.tee.formats.der import OCTET_STRING, OID, SEQUENCE, DerReader
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_raw_ecdsa
from phalanx.security.tee.formats.x509 import Certificate, read_certificates
from phalanx.security.tee.nvidia.manifest import check_manifests, read_manifest
from phalanx.security.tee.nvidia.spdm import SpdmMeasurements, parse_measurements
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

# Hopper writes the older form of the firmware's identity under the first name, Blackwell the newer under the second
_DICE = ("2.23.133.5.4.1", "2.23.133.5.4.1.1")
_FWIDS = 0xA6
_MANIFESTS = ("driver_rim", "vbios_rim")
_NO_MANIFESTS = "NVIDIA's manifests (RIM) were not sent: measurements are compared with the policy's values alone"
_NOT_CHECKED = (
    "the report does not say in words whether debugging is off: pin the measurements of a GPU where it is",
    "whether the certificate is revoked is asked of nobody: NVIDIA answers by OCSP only, which is online",
)


class NvGpuReference(Reference):
    """Reference values for GPUs.

    Measurements: by block number, ``"1"`` to ``"254"``.

    Attributes:
        driver_versions: Accepted versions of the driver; any if empty.
        vbios_versions: Accepted versions of the GPU's firmware; any if empty.
        require_manifests: Whether NVIDIA's signed manifests of driver and firmware must come along.
        manifest_roots: PEM files with NVIDIA's root for manifests, relative to the policy; the packaged one if empty.
    """

    driver_versions: tuple[str, ...] = ()
    vbios_versions: tuple[str, ...] = ()
    require_manifests: bool = False
    manifest_roots: tuple[str, ...] = ()


def appraise_nv_gpu(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a report: request and response of one SPDM exchange. The binding is the request's nonce.

    Endorsements: ``chain`` (PEM, the GPU's own certificate first); ``driver_rim`` and ``vbios_rim`` (NVIDIA's
    manifests, both or none).
    """
    if not isinstance(reference, NvGpuReference):
        raise TypeError("appraise_nv_gpu: expected NvGpuReference")
    evidence.check_names({"chain", *_MANIFESTS})
    report = parse_measurements(evidence.data)
    certificates = read_certificates(evidence.find_endorsement("chain"), "chain")
    leaf = certificates[0]
    path = check_chain(leaf, certificates[1:], trust)
    check_signs_data(leaf)
    check_raw_ecdsa(leaf.public_key, ec.SECP384R1, report.signature, report.signed, "SPDM measurements")
    _check_firmware(leaf, report)
    _check_version("driver", report.driver_version, reference.driver_versions)
    _check_version("vbios", report.vbios_version, reference.vbios_versions)
    manifests = _check_manifests(evidence, report, reference, trust)
    return Claims(
        kind="nv-gpu",
        measurements=_hex_measurements(report),
        report_data=report.nonce,
        expires=first_end((*path, *manifests)),
        tcb={"driver": report.driver_version, "vbios": report.vbios_version},
        debug_off=False,
        device=leaf.sha256_hex,
        notes=_NOT_CHECKED if manifests else (_NO_MANIFESTS, *_NOT_CHECKED),
    )


def _check_manifests(
    evidence: Evidence, report: SpdmMeasurements, reference: NvGpuReference, trust: Trust
) -> tuple[Certificate, ...]:
    """Compare the report with NVIDIA's manifests where they came along; return the certificates of their signers."""
    if not reference.require_manifests and not set(_MANIFESTS) & set(evidence.endorsements):
        return ()
    # a key for manifests vouches for no GPU, nor a GPU's for manifests
    signers = replace(trust, roots=trust.manifest_roots, manifest_roots=())
    driver, firmware = (read_manifest(evidence.find_endorsement(name), signers, name) for name in _MANIFESTS)
    check_manifests(report, driver, firmware)
    return (*driver.path, *firmware.path)


def inspect_nv_gpu(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements without appraising anything."""
    return _hex_measurements(parse_measurements(evidence.data))


def _hex_measurements(report: SpdmMeasurements) -> dict[str, str]:
    return {str(index): value.hex() for index, value in report.measurements.items()}


def _check_firmware(leaf: Certificate, report: SpdmMeasurements) -> None:
    """Check that the certificate belongs to the firmware that signed."""
    if not report.firmware_id:
        return
    place = f"certificate {leaf.subject_name!r}"
    value = next((extension for oid in _DICE if (extension := leaf.find_extension(oid)) is not None), None)
    if value is None:
        raise malformed_error(place, "does not name the firmware that holds its key")
    if not any(report.firmware_id) or report.firmware_id not in _firmware_ids(value, place):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, "SPDM measurements: of other firmware than the certificate's"
        )


def _firmware_ids(value: bytes, where: str) -> list[bytes]:
    """Read the digests of firmware out of a DICE extension: a CompositeDeviceID or a TcbInfo."""
    holder = DerReader(value, where)
    fields = holder.enter_element()
    holder.check_end()
    digests = []
    while fields.has_more():
        tag, content, _ = fields.read_element()
        inside = DerReader(content, where)
        if tag == _FWIDS:
            while inside.has_more():
                digests.append(_read_digest(inside.enter_element()))
        elif tag == SEQUENCE and inside.peek_tag() == OID:
            digests.append(_read_digest(inside))
    return digests


def _read_digest(item: DerReader) -> bytes:
    """Read SEQUENCE { hash, digest }, already entered."""
    item.read_oid()
    digest = item.read_content(OCTET_STRING)
    item.check_end()
    return digest


def _check_version(what: str, version: str, accepted: tuple[str, ...]) -> None:
    if accepted and version not in accepted:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.TCB_TOO_OLD,
            f"GPU: {what} {version[:40] or 'unknown'}, the policy accepts {', '.join(accepted)}",
        )


NV_GPU = Backend(
    NvGpuReference,
    appraise_nv_gpu,
    inspect_nv_gpu,
    packaged_roots=("nvidia_device.pem",),
    manifest_roots=("nvidia_manifests.pem",),
)
