"""The attestation result as a token: an EAT in a CWT, signed by the verifier, short-lived.

Source: RFC 9711 (EAT), RFC 8392 (CWT), RFC 8747 (cnf), RFC 9052 (COSE_Sign1 with EdDSA).
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from phalanx.errors import RefusedEvidenceError, SignatureError
from phalanx.security.crypto import Identity, Peer
from phalanx.security.tee.appraisal import AppraisalResult
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor, tag_sign1
from phalanx.security.tee.formats.cose import ALGORITHM, EDDSA, parse_sign1, to_be_signed
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

PROFILE = "tag:phalanx,2026:appraisal/1"
MAX_LIFETIME = timedelta(minutes=10)
MAX_TOKEN_BYTES = 64 * 1024
_ISSUER, _EXPIRES, _ISSUED, _CONFIRMATION, _NONCE = 1, 4, 6, 8, 10
_DEBUG_STATUS, _PROFILE = 263, 265
_KEY_ID = 3
_DISABLED_SINCE_BOOT = 2
# private use, by RFC 8392 below -65536
_KIND, _MEASUREMENTS, _RUN, _ROLE, _POLICY = -70001, -70002, -70003, -70004, -70005
_TYPES: dict[int, type] = {
    _ISSUER: str,
    _EXPIRES: int,
    _ISSUED: int,
    _CONFIRMATION: dict,
    _NONCE: bytes,
    _DEBUG_STATUS: int,
    _PROFILE: str,
    _KIND: str,
    _MEASUREMENTS: dict,
    _RUN: bytes,
    _ROLE: str,
    _POLICY: str,
}
_WHERE = "attestation token"


@dataclass(frozen=True)
class Token:
    """The claims of a valid token."""

    issuer: str
    kind: str
    measurements: dict[str, str]
    binding: Binding
    policy_digest: str
    expires: datetime


def issue_token(
    result: AppraisalResult, verifier: Identity, now: datetime, lifetime: timedelta = timedelta(minutes=5)
) -> bytes:
    """Sign the result of an appraisal, so that a relying party need not appraise.

    Args:
        result: Bound to a TLS key.
        lifetime: Cut to ten minutes, and to the end of the first certificate or collateral.

    Raises:
        RefusedEvidenceError: The evidence was bound to no key, or its certificates have ended.
    """
    if result.binding is None:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_BINDING,
            "the evidence is bound to no TLS key, so no token says anything about a peer",
        )
    expires = min(now + min(lifetime, MAX_LIFETIME), result.claims.expires)
    if expires <= now:
        raise RefusedEvidenceError(RefusedEvidenceReason.EXPIRED, f"the evidence's certificates ended at {expires}")
    claims: dict[int, Any] = {
        _ISSUER: verifier.name,
        _EXPIRES: math.floor(expires.timestamp()),
        _ISSUED: math.floor(now.timestamp()),
        _CONFIRMATION: {_KEY_ID: result.binding.tls_key},
        _NONCE: result.binding.nonce,
        _PROFILE: PROFILE,
        _KIND: result.claims.kind,
        _MEASUREMENTS: dict(result.claims.measurements),
        _RUN: result.binding.run,
        _ROLE: result.binding.role,
        _POLICY: result.policy_digest,
    }
    if result.claims.debug_off:
        claims[_DEBUG_STATUS] = _DISABLED_SINCE_BOOT
    protected, payload = encode_cbor({ALGORITHM: EDDSA}), encode_cbor(claims)
    signature = verifier.sign_data(to_be_signed(protected, payload))
    return tag_sign1(encode_cbor([protected, {}, payload, signature]))


def read_token(token: bytes, verifier: Peer, expected: Binding, now: datetime) -> Token:
    """Verify a token and return its contents.

    Args:
        token: Token from `issue_token`.
    """
    if len(token) > MAX_TOKEN_BYTES:
        raise malformed_error(_WHERE, f"{len(token)} bytes, allowed {MAX_TOKEN_BYTES}")
    message = parse_sign1(token, _WHERE)
    if message.algorithm != EDDSA:
        raise malformed_error(_WHERE, f"algorithm {message.algorithm}, expected {EDDSA} (EdDSA)")
    try:
        verifier.verify_signature(message.signature, message.signed)
    except SignatureError as exc:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"{_WHERE}: not signed by {verifier.name}"
        ) from exc
    claims = _read_claims(message.payload)
    parsed = _read_token(claims)
    if parsed.issuer != verifier.name:
        raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_SIGNER, f"{_WHERE}: issued by {parsed.issuer[:63]!r}")
    _check_times(claims, parsed, now)
    for reason, actual, other in (
        (RefusedEvidenceReason.WRONG_NONCE, parsed.binding.nonce, expected.nonce),
        (RefusedEvidenceReason.WRONG_KEY, parsed.binding.tls_key, expected.tls_key),
        (RefusedEvidenceReason.WRONG_RUN, parsed.binding.run, expected.run),
        (RefusedEvidenceReason.WRONG_ROLE, parsed.binding.role, expected.role),
    ):
        if actual != other:
            raise RefusedEvidenceError(reason, f"{_WHERE}: is about another one than this")
    return parsed


def _read_claims(payload: bytes) -> dict[int, Any]:
    claims = decode_cbor(payload, _WHERE)
    if not isinstance(claims, dict) or set(claims) | {_DEBUG_STATUS} != set(_TYPES):
        raise malformed_error(_WHERE, "its claims are not those of a Phalanx result")
    if any(type(value) is not _TYPES[name] for name, value in claims.items()):
        raise malformed_error(_WHERE, "a claim is of another type")
    if claims[_PROFILE] != PROFILE or claims.get(_DEBUG_STATUS, _DISABLED_SINCE_BOOT) != _DISABLED_SINCE_BOOT:
        raise malformed_error(_WHERE, "another profile, or debug not disabled")
    return claims


def _read_token(claims: dict[int, Any]) -> Token:
    measurements, confirmation = claims[_MEASUREMENTS], claims[_CONFIRMATION]
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in measurements.items()):
        raise malformed_error(_WHERE, "its measurements")
    if set(confirmation) != {_KEY_ID} or not isinstance(confirmation[_KEY_ID], bytes):
        raise malformed_error(_WHERE, "its confirmation key")
    try:
        binding = Binding(claims[_NONCE], confirmation[_KEY_ID], claims[_RUN], claims[_ROLE])
        expires = datetime.fromtimestamp(claims[_EXPIRES], UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise malformed_error(_WHERE, "a claim is out of range") from exc
    return Token(claims[_ISSUER], claims[_KIND], measurements, binding, claims[_POLICY], expires)


def _check_times(claims: dict[int, Any], token: Token, now: datetime) -> None:
    moment = now.timestamp()
    if claims[_EXPIRES] - claims[_ISSUED] > MAX_LIFETIME.total_seconds():
        raise malformed_error(_WHERE, f"lives longer than {MAX_LIFETIME}")
    if moment < claims[_ISSUED]:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NOT_YET_VALID, f"{_WHERE}: issued after {now}; compare the clocks"
        )
    if moment >= claims[_EXPIRES]:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.EXPIRED, f"{_WHERE}: ended at {token.expires}, the clock says {now}"
        )
