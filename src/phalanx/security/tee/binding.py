"""The binding of evidence: the verifier's nonce, the attester's TLS key, the run and the role.

One digest goes into the evidence. A report field of 64 bytes holds it followed by zeros; 32 bytes hold it alone.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass

from phalanx.errors import RefusedEvidenceError
from phalanx.security.crypto.canonical import in_domain
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

NONCE_BYTES = 32
_ROLE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Binding:
    """The facts that evidence is bound to: one verifier's nonce, one TLS key, one run and one role.

    Attributes:
        nonce: 32 random bytes that the verifier chose for this one appraisal.
        tls_key: SHA-256 over the SubjectPublicKeyInfo of the attester's TLS key, 32 bytes.
        run: Digest of the run's config, 32 bytes.
        role: Role of the attester in the run, such as ``server``.
    """

    nonce: bytes
    tls_key: bytes
    run: bytes
    role: str = "server"

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"binding: nonce of {len(self.nonce)} bytes, expected {NONCE_BYTES}")
        if len(self.tls_key) != _DIGEST_BYTES or len(self.run) != _DIGEST_BYTES:
            raise ValueError("binding: the digests of TLS key and run have 32 bytes each")
        if _ROLE.fullmatch(self.role) is None:
            raise ValueError(f"binding: role {self.role[:40]!r}, expected 1 to 32 of a-z, 0-9 and hyphen")

    def binding_digest(self) -> bytes:
        """Return the 32 bytes that evidence must carry: SHA-256 over fields of known length, in a domain of its own."""
        role = self.role.encode("ascii")
        fields = self.nonce + self.tls_key + self.run + bytes([len(role)]) + role
        return hashlib.sha256(in_domain("attestation-binding/1", fields)).digest()


@dataclass(frozen=True)
class RawReportData:
    """Report data that the verifier knows as it is: evidence that was made without a `Binding`.

    No TLS key is proven by it, so no key is ever released against such an appraisal.
    """

    data: bytes


Expected = Binding | RawReportData


def check_report_data(report_data: bytes, expected: Expected) -> None:
    """Check that evidence carries the report data that the verifier expects."""
    if isinstance(expected, RawReportData):
        if not hmac.compare_digest(report_data, expected.data):
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE,
                f"report data {_shorten_bytes(report_data)}, expected {_shorten_bytes(expected.data)}; "
                "ask for evidence with a fresh nonce",
            )
        return
    # a field shorter than the digest can hold no binding, so it must not be cut to fit
    expected_bytes = expected.binding_digest().ljust(len(report_data), b"\0")
    if not hmac.compare_digest(report_data, expected_bytes):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_BINDING,
            f"report data {_shorten_bytes(report_data)} is not made of this nonce, TLS key, run and role; "
            f"expected {_shorten_bytes(expected_bytes)}",
        )


def check_statement(stated: Binding | None, expected: Expected) -> None:
    """Compare the attester's stated binding with the expected one, to name the wrong part.

    The statement is not signed and proves nothing: `check_report_data` does.
    """
    if stated is None or isinstance(expected, RawReportData):
        return
    if not hmac.compare_digest(stated.nonce, expected.nonce):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_NONCE, "made for another nonce; it is stale, replayed or relayed"
        )
    if stated.tls_key != expected.tls_key:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_KEY,
            f"bound to TLS key {_shorten_bytes(stated.tls_key)}, expected {_shorten_bytes(expected.tls_key)}",
        )
    if stated.run != expected.run:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_RUN,
            f"bound to run {_shorten_bytes(stated.run)}, expected {_shorten_bytes(expected.run)}; compare run files",
        )
    if stated.role != expected.role:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_ROLE, f"bound to role {stated.role!r}, expected {expected.role!r}"
        )


def _shorten_bytes(data: bytes) -> str:
    return f"{data.hex()[:16]}... ({len(data)} bytes)" if len(data) > 8 else data.hex() or "nothing"
