"""The common part of SGX and TDX: from the attestation key through the quoting enclave and the PCK to Intel's root.

Source: Intel SGX DCAP, "Quote verification"; the order of the checks is that of its flow chart.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.claims import Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust, check_chain, check_signs_data, first_end
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_raw_ecdsa, point_to_key
from phalanx.security.tee.formats.x509 import read_certificates
from phalanx.security.tee.intel.dcap_collateral import Collateral, check_collateral
from phalanx.security.tee.intel.dcap_quote import TDX, Quote, TdxBody, parse_quote
from phalanx.security.tee.intel.dcap_tcb import (
    Level,
    Status,
    module_level,
    platform_level,
    quoting_enclave_level,
    worst_level,
)
from phalanx.security.tee.intel.pck import PckFacts, pck_facts
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_PCK = "Intel SGX PCK Certificate"
_SGX_DEBUG = 0x02


class DcapReference(Reference):
    """The common part of SGX and TDX policies.

    Attributes:
        accepted_tcb: Accepted statuses, in Intel's words; ``Revoked`` never passes.
        accepted_advisories: Advisories that may be open; any if left out.
        min_evaluation: Lowest accepted number of Intel's TCB evaluation, against old but unexpired tables.
    """

    accepted_tcb: tuple[Status, ...] = ("UpToDate",)
    accepted_advisories: tuple[str, ...] | None = None
    min_evaluation: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class CheckedQuote:
    """A quote with sound signatures, chain and TCB.

    Attributes:
        evaluation: Number of the TCB table.
        expires: Earliest end of a certificate or table.
    """

    quote: Quote
    level: Level
    pck: PckFacts
    evaluation: int
    expires: datetime


def check_quote(evidence: Evidence, tee: int, reference: DcapReference, trust: Trust) -> CheckedQuote:
    """Appraise everything about a quote but the mode of the TEE itself.

    Endorsements: ``collateral``.
    """
    evidence.check_names({"collateral"})
    quote = parse_quote(evidence.data)
    if quote.tee != tee:
        raise malformed_error("quote", f"is of TEE type {quote.tee:#x}, the evidence is of kind {evidence.kind}")
    collateral = check_collateral(evidence.find_endorsement("collateral"), trust)
    certificates = read_certificates(quote.chain, "PCK chain")
    if collateral.pck_chain is not None:
        again = read_certificates(collateral.pck_chain, "pck_certificate_chain")
        if [certificate.raw for certificate in again] != [certificate.raw for certificate in certificates]:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.BAD_CHAIN, "pck_certificate_chain: is not the chain inside the quote"
            )
    others = (*certificates[1:], *read_certificates(collateral.crl_chain, "pck_crl_issuer_chain"))
    path = check_chain(certificates[0], others, collateral.trust)
    check_signs_data(certificates[0])
    if certificates[0].subject_name != _PCK:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, f"quote: signed below {certificates[0].subject_name!r}, no PCK"
        )
    # A list that covers nothing on the path was left unchecked, so it is refused instead
    issuers = {certificate.subject for certificate in path[1:]}
    strangers = [crl for crl in collateral.lists if crl.issuer not in issuers]
    if strangers:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_CHAIN, "collateral: a revocation list of an authority off the path"
        )
    check_raw_ecdsa(
        certificates[0].public_key, ec.SECP256R1, quote.qe_signature, quote.qe_report, "report of the quoting enclave"
    )
    _check_attestation_key(quote)
    pck = pck_facts(certificates[0])
    level = _appraise_level(quote, collateral, pck)
    _check_level(level, collateral, reference)
    return CheckedQuote(quote, level, pck, collateral.tcb_info.evaluation, min(collateral.expires, first_end(path)))


def _check_attestation_key(quote: Quote) -> None:
    bound = hashlib.sha256(quote.attestation_key + quote.qe_auth).digest().ljust(64, b"\0")
    if quote.qe.report_data != bound:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, "quote: its key is not the one that the quoting enclave made"
        )
    if quote.qe.attributes[0] & _SGX_DEBUG:
        raise RefusedEvidenceError(RefusedEvidenceReason.DEBUG_ENABLED, "quoting enclave: in debug mode")
    key = point_to_key(quote.attestation_key, ec.SECP256R1(), "attestation key")
    check_raw_ecdsa(key, ec.SECP256R1, quote.signature, quote.signed, "quote")


def _appraise_level(quote: Quote, collateral: Collateral, pck: PckFacts) -> Level:
    expected = ("TDX", "TD_QE") if quote.tee == TDX else ("SGX", "QE")
    if (collateral.tcb_info.id, collateral.qe_identity.id) != expected:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, f"collateral: for {collateral.tcb_info.id}, expected {expected[0]}"
        )
    levels = [platform_level(collateral.tcb_info, pck, quote.body)]
    if isinstance(quote.body, TdxBody):
        levels.append(module_level(collateral.tcb_info, quote.body))
    levels.append(quoting_enclave_level(collateral.qe_identity, quote.qe))
    return worst_level(levels)


def _check_level(level: Level, collateral: Collateral, reference: DcapReference) -> None:
    if level.status == "Revoked":
        raise RefusedEvidenceError(RefusedEvidenceReason.REVOKED, "TCB: Intel has revoked this level")
    if level.status not in reference.accepted_tcb:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.TCB_TOO_OLD,
            f"TCB: {level.status} ({' '.join(level.advisories) or 'no advisory'}), "
            f"the policy accepts {', '.join(reference.accepted_tcb)}",
        )
    accepted = level.advisories if reference.accepted_advisories is None else reference.accepted_advisories
    if still_open := sorted(set(level.advisories) - set(accepted)):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.TCB_TOO_OLD, f"TCB: {' '.join(still_open)} open, the policy forbids it"
        )
    if min(collateral.tcb_info.evaluation, collateral.qe_identity.evaluation) < reference.min_evaluation:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.TCB_TOO_OLD,
            f"collateral: older than evaluation {reference.min_evaluation}; fetch it anew",
        )
