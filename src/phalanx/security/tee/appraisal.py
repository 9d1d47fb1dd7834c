"""The verifier of RFC 9334: evidence, policy and clock in; a result or one refusal out."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.backends import backend_of
from phalanx.security.tee.binding import Binding, Expected, check_report_data, check_statement
from phalanx.security.tee.claims import Claims, check_measurements
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.policy import Policy
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason


@dataclass(frozen=True)
class AppraisalResult:
    """Evidence that passed.

    Attributes:
        binding: Nonce, TLS key, run and role that it is bound to; None where plain report data was expected.
    """

    claims: Claims
    binding: Binding | None
    appraised_at: datetime
    policy_digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        claims, bound = self.claims, self.binding
        return {
            "accepted": True,
            "kind": claims.kind,
            "measurements": dict(claims.measurements),
            "tcb": dict(claims.tcb),
            "device": claims.device,
            "report_data": claims.report_data.hex(),
            "bound": None
            if bound is None
            else {
                "nonce": bound.nonce.hex(),
                "tls_key": bound.tls_key.hex(),
                "run": bound.run.hex(),
                "role": bound.role,
            },
            "debug": False if claims.debug_off else None,
            "appraised_at": self.appraised_at.isoformat(),
            "expires": claims.expires.isoformat(),
            "policy_digest": self.policy_digest or None,
            "notes": list(claims.notes),
        }


def appraise_evidence(evidence: Evidence, policy: Policy, expected: Expected, now: datetime) -> AppraisalResult:
    """Appraise one piece of evidence, offline.

    Args:
        evidence: Received evidence; nothing in it is believed before its signature holds.
        expected: Values that the verifier chose and knows: nonce, TLS key, run, role.

    Raises:
        RefusedEvidenceError: Anything at all is not as it must be; `reason` says what.

    Guarantees:
        Bytes from the attester lead to a result or to this one error, never to another. Signatures, chain, TCB and
        mode are judged before freshness and measurements: a reason of the latter is said of genuine evidence only.

    Source: RFC 9334 (RATS architecture).
    """
    if now.tzinfo is None:
        raise ValueError("appraise: the clock has no time zone; pass an aware datetime")
    backend = backend_of(evidence.kind)
    if evidence.kind == "sim" and not policy.allow_insecure_sim:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.INSECURE_KIND,
            "simulated evidence proves nothing; it passes with allow_insecure_sim only",
        )
    reference = policy.reference_for(evidence.kind)
    trust = policy.trust_for(evidence.kind, now)
    if backend.needs_roots and not trust.roots:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NO_ROOT,
            f"{evidence.kind}: no root is pinned; name the vendor's root in the policy (roots = [...])",
        )
    claims = backend.appraise(evidence, reference, trust)
    check_statement(evidence.statement, expected)
    check_report_data(claims.report_data, expected)
    check_measurements(claims.measurements, reference, policy.revoked_measurements)
    binding = expected if isinstance(expected, Binding) else None
    return AppraisalResult(claims, binding, now, policy.digest)


def appraise_together(
    parts: Iterable[Evidence], required: Iterable[str], policy: Policy, expected: Expected, now: datetime
) -> tuple[AppraisalResult, ...]:
    """Appraise the evidence of several devices of one machine, such as CPU and GPU.

    All must carry the same binding: a GPU's report for another nonce or key could be another machine's.

    Raises:
        RefusedEvidenceError: One is refused, a required one is absent, or a kind is there twice.
    """
    pieces = tuple(parts)
    kinds = [piece.kind for piece in pieces]
    missing = sorted(set(required) - set(kinds))
    if missing or not pieces or len(set(kinds)) != len(kinds):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.MISSING_ENDORSEMENT,
            f"evidence of {', '.join(kinds) or 'nothing'}; expected one of each kind, {', '.join(missing) or 'none'} "
            "is missing",
        )
    return tuple(appraise_evidence(piece, policy, expected, now) for piece in pieces)
