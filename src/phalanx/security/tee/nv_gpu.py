"""NVIDIA GPUs in confidential mode: a signed SPDM report with the GPU's own certificate chain.

Source: DMTF DSP0274 1.1; TCG DICE Attestation Architecture; NVIDIA nvtrust.
"""

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric import ec

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.chain import Trust, check_chain, check_signs_data, first_end
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.der import OCTET_STRING, OID, SEQUENCE, Der
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.reader import malformed
from phalanx.security.tee.reason import Reason
from phalanx.security.tee.signature import check_raw_ecdsa
from phalanx.security.tee.spdm import SpdmMeasurements, parse_measurements
from phalanx.security.tee.x509 import Certificate, read_certificates

# Hopper writes the older form of the firmware's identity under the first name, Blackwell the newer under the second
_DICE = ("2.23.133.5.4.1", "2.23.133.5.4.1.1")
_FWIDS = 0xA6
_NOT_CHECKED = (
    "the report does not say in words whether debugging is off: pin the measurements of a GPU where it is",
    "NVIDIA's signed reference manifests (RIM) are not read: measurements are compared with the policy's values alone",
    "whether the certificate is revoked is asked of nobody: NVIDIA answers by OCSP only, which is online",
)


class NvGpuReference(Reference):
    """Reference values for GPUs.

    Measurements: by block number, ``"1"`` to ``"254"``.

    Attributes:
        driver_versions: Accepted versions of the driver; any if empty.
        vbios_versions: Accepted versions of the GPU's firmware; any if empty.
    """

    driver_versions: tuple[str, ...] = ()
    vbios_versions: tuple[str, ...] = ()


def appraise_nv_gpu(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Judge a report: request and response of one SPDM exchange. The binding is the request's nonce.

    Endorsements: ``chain`` (PEM, the GPU's own certificate first).

    Raises:
        RefusedEvidenceError: As `appraise`.
    """
    if not isinstance(reference, NvGpuReference):
        raise TypeError("appraise_nv_gpu: expected NvGpuReference")
    evidence.check_names({"chain"})
    report = parse_measurements(evidence.data)
    certificates = read_certificates(evidence.endorsement("chain"), "chain")
    leaf = certificates[0]
    path = check_chain(leaf, certificates[1:], trust)
    check_signs_data(leaf)
    check_raw_ecdsa(leaf.key, ec.SECP384R1, report.signature, report.signed, "SPDM measurements")
    _check_firmware(leaf, report)
    _check_version("driver", report.driver_version, reference.driver_versions)
    _check_version("vbios", report.vbios_version, reference.vbios_versions)
    return Claims(
        kind="nv-gpu",
        measurements=_measurements(report),
        report_data=report.nonce,
        expires=first_end(path),
        tcb={"driver": report.driver_version, "vbios": report.vbios_version},
        debug_off=False,
        device=leaf.fingerprint,
        notes=_NOT_CHECKED,
    )


def inspect_nv_gpu(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements and judge nothing."""
    return _measurements(parse_measurements(evidence.data))


def _measurements(report: SpdmMeasurements) -> dict[str, str]:
    return {str(index): value.hex() for index, value in report.measurements.items()}


def _check_firmware(leaf: Certificate, report: SpdmMeasurements) -> None:
    """Check that the firmware which signed is the one that the certificate was made for."""
    if not report.fwid:
        return
    where = f"certificate {leaf.name!r}"
    value = next((one for oid in _DICE if (one := leaf.extension(oid)) is not None), None)
    if value is None:
        raise malformed(where, "does not name the firmware that holds its key")
    if not any(report.fwid) or report.fwid not in _firmware_ids(value, where):
        raise RefusedEvidenceError(Reason.WRONG_SIGNER, "SPDM measurements: of other firmware than the certificate's")


def _firmware_ids(value: bytes, where: str) -> list[bytes]:
    """Read the digests of firmware out of a DICE extension: a CompositeDeviceID or a TcbInfo."""
    holder = Der(value, where)
    fields = holder.enter()
    holder.end()
    found = []
    while fields.more():
        tag, content, _ = fields.any()
        inside = Der(content, where)
        if tag == _FWIDS:
            while inside.more():
                found.append(_digest(inside.enter()))
        elif tag == SEQUENCE and inside.peek() == OID:
            found.append(_digest(inside))
    return found


def _digest(item: Der) -> bytes:
    """Read SEQUENCE { hash, digest }, already entered."""
    item.oid()
    digest = item.read(OCTET_STRING)
    item.end()
    return digest


def _check_version(what: str, found: str, accepted: tuple[str, ...]) -> None:
    if accepted and found not in accepted:
        raise RefusedEvidenceError(
            Reason.TCB_TOO_OLD, f"GPU: {what} {found[:40] or 'unknown'}, the policy accepts {', '.join(accepted)}"
        )


NV_GPU = Backend(NvGpuReference, appraise_nv_gpu, inspect_nv_gpu, packaged_roots=("nvidia_device.pem",))
