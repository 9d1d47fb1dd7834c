"""AMD SEV-SNP: a report signed by the chip's key (VCEK) or by a cloud's key for its chips (VLEK).

Source: AMD 56860 (firmware ABI), 57230 (VCEK certificate and KDS), 58369 (VLEK).
"""

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field, field_validator

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.amd.snp_report import (
    VCEK,
    VLEK,
    SnpReport,
    decode_tcb,
    known_products,
    parse_report,
    product_of,
)
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust, check_chain, first_end
from phalanx.security.tee.formats.der import IA5_STRING, OCTET_STRING, DerReader
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_ecdsa
from phalanx.security.tee.formats.x509 import Certificate, parse_crl, read_certificates
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_AMD = "1.3.6.1.4.1.3704.1"
_PRODUCT, _HARDWARE_ID, _CSP_ID = f"{_AMD}.2", f"{_AMD}.4", f"{_AMD}.5"
_VERSIONS = {
    "bootloader": f"{_AMD}.3.1",
    "tee": f"{_AMD}.3.2",
    "snp": f"{_AMD}.3.3",
    "microcode": f"{_AMD}.3.8",
    "fmc": f"{_AMD}.3.9",
}
_SIGNERS = {VCEK: ("vcek", "SEV-VCEK"), VLEK: ("vlek", "SEV-VLEK")}
_SMT, _ALWAYS_ONE, _MIGRATION, _DEBUG = 1 << 16, 1 << 17, 1 << 18, 1 << 19
# of one silicon, with the layout and the root of Genoa
_RELATIVES = {"Siena": "Genoa", "Bergamo": "Genoa"}
_FLOOR = {"bootloader", "tee", "snp", "microcode"}


class SnpReference(Reference):
    """Reference values for SEV-SNP.

    Measurements: ``launch`` (48 bytes) and, where wanted, ``host_data``, ``id_key_digest``, ``author_key_digest``,
    ``family_id``, ``image_id``, ``guest_svn``.

    Attributes:
        min_tcb: Lowest accepted version of ``bootloader``, ``tee``, ``snp``, ``microcode`` and, for Turin, ``fmc``.
        max_vmpl: Highest (least privileged) level that may ask for a report.
        allow_smt: Whether the guest may run with its sibling threads in use.
        allow_migration: Whether a migration agent may move the guest.
        allow_masked_chip: Whether a report signed by a VCEK may hide which chip it is from.
        csp_ids: Clouds of which a VLEK is accepted, by the name in the certificate; any if empty.
    """

    min_tcb: dict[str, int]
    max_vmpl: int = Field(default=0, ge=0, le=3)
    allow_smt: bool = True
    allow_migration: bool = False
    allow_masked_chip: bool = False
    csp_ids: tuple[str, ...] = ()

    @field_validator("min_tcb")
    @classmethod
    def _known_parts(cls, value: dict[str, int]) -> dict[str, int]:
        if set(value) - {"fmc"} != _FLOOR or any(not 0 <= number <= 255 for number in value.values()):
            raise ValueError(f"expected {', '.join(sorted(_FLOOR))} and perhaps fmc, each 0 to 255; found {value}")
        return value


def appraise_snp(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a report.

    Endorsements: ``vcek`` or ``vlek`` (DER or PEM), ``chain`` (PEM: ASK or ASVK, ARK), ``crl`` (DER) if wanted.
    """
    if not isinstance(reference, SnpReference):
        raise TypeError("appraise_snp: expected SnpReference")
    evidence.check_names({"vcek", "vlek", "chain", "crl"})
    report = parse_report(evidence.data)
    leaf = _read_leaf(evidence, report)
    if "crl" in evidence.endorsements:
        sent = parse_crl(evidence.endorsements["crl"])
        trust = Trust(trust.roots, trust.now, (*trust.crls, sent), trust.revoked, trust.require_crl)
    path = check_chain(leaf, read_certificates(evidence.find_endorsement("chain"), "chain"), trust)
    check_ecdsa(leaf.public_key, ec.SECP384R1, report.r, report.s, report.signed, "SNP report")
    product = _read_product(leaf, report)
    _check_identity(leaf, report, reference)
    tcb = decode_tcb(report.tcbs["reported"], product)
    _check_certified_tcb(leaf, tcb)
    _check_mode(report, reference)
    _check_floor(tcb, reference)
    covered = any(crl.issuer == path[-1].subject for crl in trust.crls)
    return Claims(
        kind="snp",
        measurements=inspect_report(report),
        report_data=report.report_data,
        expires=first_end(path),
        tcb={"product": product, **tcb},
        device=report.chip_id.hex() if any(report.chip_id) else "",
        notes=() if covered else ("no revocation list of the ARK was given, so revocation was not checked",),
    )


def inspect_snp(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements without appraising anything."""
    return inspect_report(parse_report(evidence.data))


def inspect_report(report: SnpReport) -> dict[str, str]:
    """Return the fields of a report that a policy can name; the report's own random ids are none."""
    return {name: value for name, value in report.fields.items() if not name.startswith("report_id")}


def _read_leaf(evidence: Evidence, report: SnpReport) -> Certificate:
    signer = _SIGNERS.get(report.signing_key)
    if signer is None:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"SNP report: signed by key {report.signing_key}, that is none"
        )
    endorsement, subject = signer
    certificates = read_certificates(evidence.find_endorsement(endorsement), endorsement)
    if len(certificates) != 1 or certificates[0].subject_name != subject:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"{endorsement}: names {certificates[0].subject_name!r}, expected one certificate of {subject}",
        )
    return certificates[0]


def _read_product(leaf: Certificate, report: SnpReport) -> str:
    """Return the product by the certificate, such as Milan for Milan-B0, and compare it with the report's CPU."""
    value = leaf.find_extension(_PRODUCT)
    if value is None:
        raise malformed_error(leaf.subject_name, "does not name its product")
    holder = DerReader(value, leaf.subject_name)
    product = holder.read_content(IA5_STRING).decode("ascii", "replace").partition("-")[0]
    holder.check_end()
    product = _RELATIVES.get(product, product)
    if product not in known_products():
        raise malformed_error(leaf.subject_name, f"product {product[:20]!r}; known: {', '.join(known_products())}")
    if report.family_model is not None and product_of(report.family_model) != product:
        family, model = report.family_model
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"{leaf.subject_name}: of {product}, the report is of family {family:#x} model {model:#x}",
        )
    return product


def _check_identity(leaf: Certificate, report: SnpReport, reference: SnpReference) -> None:
    hardware_id = leaf.find_extension(_HARDWARE_ID)
    if report.signing_key == VLEK:
        _check_cloud(leaf, reference)
    elif hardware_id is None:
        raise malformed_error(leaf.subject_name, "does not say of which chip it is")
    if not any(report.chip_id):
        # a VLEK speaks for a cloud and for no chip
        if report.signing_key == VCEK and not reference.allow_masked_chip:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.FORBIDDEN_MODE, "SNP report: hides its chip; accepted with allow_masked_chip only"
            )
    elif (
        report.signing_key == VCEK
        and _read_chip_id(hardware_id or b"", leaf.subject_name).ljust(64, b"\0") != report.chip_id
    ):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, f"{leaf.subject_name}: is another chip's than the report's"
        )


def _check_cloud(leaf: Certificate, reference: SnpReference) -> None:
    value = leaf.find_extension(_CSP_ID)
    if value is None:
        raise malformed_error(leaf.subject_name, "does not say of which cloud it is")
    holder = DerReader(value, leaf.subject_name)
    _, content, _ = holder.read_element()
    holder.check_end()
    cloud = content.decode("utf-8", "replace")
    if reference.csp_ids and cloud not in reference.csp_ids:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"{leaf.subject_name}: of cloud {cloud[:40]!r}, accepted: {', '.join(reference.csp_ids)}",
        )


def _read_chip_id(value: bytes, where: str) -> bytes:
    """Return the chip id: AMD writes it plainly, without the DER around it that other extensions have."""
    if len(value) in (8, 64):
        return value
    holder = DerReader(value, where)
    content = holder.read_content(OCTET_STRING)
    holder.check_end()
    return content


def _check_certified_tcb(leaf: Certificate, tcb: Mapping[str, int]) -> None:
    for name, reported in tcb.items():
        value = leaf.find_extension(_VERSIONS[name])
        if value is None:
            raise malformed_error(leaf.subject_name, f"does not say for which {name} version it is")
        holder = DerReader(value, leaf.subject_name)
        certified = holder.read_integer()
        holder.check_end()
        if certified != reported:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_SIGNER,
                f"{leaf.subject_name}: is for {name} {certified}, the report says {reported}",
            )


def _check_mode(report: SnpReport, reference: SnpReference) -> None:
    if report.policy & _DEBUG:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.DEBUG_ENABLED, "SNP report: the guest's policy lets the host debug it"
        )
    if not report.policy & _ALWAYS_ONE:
        raise malformed_error("SNP report", "bit 17 of the guest's policy must be set")
    if report.policy & _MIGRATION and not reference.allow_migration:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.FORBIDDEN_MODE, "SNP report: the guest can be migrated (allow_migration)"
        )
    if report.policy & _SMT and not reference.allow_smt:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.FORBIDDEN_MODE, "SNP report: the guest may run beside others (allow_smt)"
        )
    if report.vmpl > reference.max_vmpl:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.FORBIDDEN_MODE,
            f"SNP report: asked for at VMPL {report.vmpl}, allowed {reference.max_vmpl}",
        )


def _check_floor(tcb: Mapping[str, int], reference: SnpReference) -> None:
    for name, lowest in reference.min_tcb.items():
        if name in tcb and tcb[name] < lowest:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.TCB_TOO_OLD,
                f"SNP report: {name} {tcb[name]}, the policy asks for {lowest}; update the firmware",
            )


SNP = Backend(SnpReference, appraise_snp, inspect_snp, packaged_roots=("amd_milan.pem",))
