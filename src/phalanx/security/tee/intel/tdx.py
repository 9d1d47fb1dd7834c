"""Intel TDX: a trust domain's quote, versions 4 and 5 (TDX 1.0 and 1.5)."""

from collections.abc import Mapping

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.intel.dcap import DcapReference, check_quote
from phalanx.security.tee.intel.dcap_quote import TDX as TDX_TEE
from phalanx.security.tee.intel.dcap_quote import TdxBody, parse_quote
from phalanx.security.tee.intel.dcap_tcb import tcb_claims
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason


class TdxReference(DcapReference):
    """Reference values for TDX.

    Measurements: ``mrtd``, ``rtmr0`` to ``rtmr3``, ``mrconfigid``, ``mrowner``, ``mrownerconfig``, ``mrseam``,
    ``td_attributes``, ``xfam``, and in version 5 ``mrservicetd``, ``tee_tcb_svn2``.

    Attributes:
        allow_service_td: Whether a service domain (for migration) may be bound to the trust domain.
    """

    allow_service_td: bool = False


def appraise_tdx(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a quote; see `check_quote`."""
    if not isinstance(reference, TdxReference):
        raise TypeError("appraise_tdx: expected TdxReference")
    checked = check_quote(evidence, TDX_TEE, reference, trust)
    body = _require_tdx_body(checked.quote.body)
    # bits 0 to 7 are the group "TUD": any of them makes the domain one under debug
    if body.attributes[0]:
        raise RefusedEvidenceError(RefusedEvidenceReason.DEBUG_ENABLED, "TDX quote: the trust domain is under debug")
    service_td = body.fields.get("mrservicetd", "")
    if service_td.strip("0") and not reference.allow_service_td:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.FORBIDDEN_MODE, "TDX quote: a service domain is bound to it (allow_service_td)"
        )
    tcb = tcb_claims(checked.level, checked.evaluation)
    return Claims("tdx", body.fields, body.report_data, checked.expires, tcb, device=f"fmspc {checked.pck.fmspc.hex()}")


def inspect_tdx(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements without appraising anything."""
    return _require_tdx_body(parse_quote(evidence.data).body).fields


def _require_tdx_body(body: object) -> TdxBody:
    if not isinstance(body, TdxBody):
        raise malformed_error("quote", "is of another TEE than TDX")
    return body


TDX = Backend(TdxReference, appraise_tdx, inspect_tdx, packaged_roots=("intel_sgx.pem",))
