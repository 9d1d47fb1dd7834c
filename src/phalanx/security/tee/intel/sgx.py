"""Intel SGX: an enclave's quote, versions 3, 4 and 5."""

from collections.abc import Mapping

from pydantic import Field

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.intel.dcap import DcapReference, check_quote
from phalanx.security.tee.intel.dcap_quote import SGX as SGX_TEE
from phalanx.security.tee.intel.dcap_quote import SgxBody, parse_quote
from phalanx.security.tee.intel.dcap_tcb import tcb_claims
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_INITIALISED, _DEBUG = 0x01, 0x02


class SgxReference(DcapReference):
    """Reference values for SGX.

    Measurements: ``mrenclave``, or ``mrsigner`` with `product_id` and `min_svn`; ``config_id`` and others where wanted.

    Attributes:
        product_id: Expected ISVPRODID; any if left out.
    """

    product_id: int | None = None
    min_svn: int = Field(default=0, ge=0)


def appraise_sgx(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a quote; see `check_quote`."""
    if not isinstance(reference, SgxReference):
        raise TypeError("appraise_sgx: expected SgxReference")
    checked = check_quote(evidence, SGX_TEE, reference, trust)
    body = _require_sgx_body(checked.quote.body)
    if body.attributes[0] & _DEBUG:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.DEBUG_ENABLED, "SGX quote: the host can read a debug enclave's memory"
        )
    if not body.attributes[0] & _INITIALISED:
        raise RefusedEvidenceError(RefusedEvidenceReason.FORBIDDEN_MODE, "SGX quote: the enclave was not initialised")
    if reference.product_id is not None and body.product_id != reference.product_id:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_MEASUREMENT,
            f"SGX quote: product {body.product_id}, expected {reference.product_id}",
        )
    if body.svn < reference.min_svn:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.TCB_TOO_OLD, f"SGX quote: ISVSVN {body.svn}, expected {reference.min_svn}"
        )
    tcb = {**tcb_claims(checked.level, checked.evaluation), "isv_prod_id": body.product_id, "isv_svn": body.svn}
    return Claims("sgx", body.fields, body.report_data, checked.expires, tcb, device=f"fmspc {checked.pck.fmspc.hex()}")


def inspect_sgx(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements without appraising anything."""
    return _require_sgx_body(parse_quote(evidence.data).body).fields


def _require_sgx_body(body: object) -> SgxBody:
    if not isinstance(body, SgxBody):
        raise malformed_error("quote", "is of another TEE than SGX")
    return body


SGX = Backend(SgxReference, appraise_sgx, inspect_sgx, packaged_roots=("intel_sgx.pem",))
