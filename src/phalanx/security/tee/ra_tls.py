"""RA-TLS: evidence inside a TLS certificate, so that the handshake proves the binding of the evidence.

The extension is that of the TCG's DICE conceptual message wrapper; in it a CBOR array of media type, envelope and the
mark "evidence".

Source: TCG DICE Attestation Architecture 1.2 (2.23.133.5.4.9); IETF draft-ietf-rats-msg-wrap.
"""

import hashlib
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from cryptography.x509.oid import NameOID

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.appraisal import AppraisalResult, appraise_evidence
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence, parse_evidence
from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_x509_signature
from phalanx.security.tee.formats.x509 import parse_certificate
from phalanx.security.tee.policy import Policy
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

EXTENSION_OID = "2.23.133.5.4.9"
MEDIA_TYPE = "application/vnd.phalanx.evidence+json"
_EVIDENCE = 4
_WHERE = "RA-TLS certificate"
_CLOCK_SKEW = timedelta(minutes=5)
MAX_CERTIFICATE_BYTES = 256 * 1024


def tls_key_digest(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return what evidence is bound to: SHA-256 over the SubjectPublicKeyInfo of a TLS key."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def read_tls_key_digest(pem: bytes) -> bytes:
    """Return the digest of the key in a PEM file that holds a certificate or a public key."""
    key: PublicKeyTypes
    if b"-----BEGIN CERTIFICATE" in pem:
        key = x509.load_pem_x509_certificate(pem).public_key()
    else:
        key = load_pem_public_key(pem)
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def make_certificate(
    key: ec.EllipticCurvePrivateKey, name: str, evidence: Evidence, now: datetime, lifetime: timedelta
) -> bytes:
    """Make a self-signed certificate that carries evidence; what counts is the evidence, not the signature.

    Args:
        now: Begin of validity, five minutes less.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    wrapped = encode_cbor([MEDIA_TYPE, evidence.to_bytes(), _EVIDENCE])
    extension = x509.UnrecognizedExtension(x509.ObjectIdentifier(EXTENSION_OID), wrapped)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(extension, critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


def read_evidence(certificate: bytes) -> tuple[Evidence, bytes]:
    """Take the evidence out of a certificate in DER, without judging it.

    Returns:
        The evidence, and the digest of the certificate's key.
    """
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise malformed_error(_WHERE, f"{len(certificate)} bytes, allowed {MAX_CERTIFICATE_BYTES}")
    parsed = parse_certificate(certificate, _WHERE, MAX_CERTIFICATE_BYTES)
    value = parsed.find_extension(EXTENSION_OID)
    if value is None:
        raise RefusedEvidenceError(RefusedEvidenceReason.MISSING_ENDORSEMENT, f"{_WHERE}: carries no evidence")
    wrapped = decode_cbor(value, _WHERE)
    if not isinstance(wrapped, list) or len(wrapped) != 3 or wrapped[0] != MEDIA_TYPE or wrapped[2] != _EVIDENCE:
        raise malformed_error(_WHERE, f"its evidence is not of type {MEDIA_TYPE}")
    if not isinstance(wrapped[1], bytes):
        raise malformed_error(_WHERE, "its evidence is no bytes")
    return parse_evidence(wrapped[1]), hashlib.sha256(parsed.spki).digest()


def appraise_certificate(
    certificate: bytes, policy: Policy, nonce: bytes, run: bytes, role: str, now: datetime
) -> AppraisalResult:
    """Appraise the peer of a TLS handshake by its certificate, in DER as the TLS library hands it out.

    TLS has proven that the peer holds the certificate's key; the evidence must be bound to that very key.

    Raises:
        RefusedEvidenceError: As `appraise`; also when the certificate's dates or signature do not hold.
    """
    evidence, key = read_evidence(certificate)
    parsed = parse_certificate(certificate, _WHERE, MAX_CERTIFICATE_BYTES)
    if parsed.subject != parsed.issuer:
        raise RefusedEvidenceError(RefusedEvidenceReason.BAD_CHAIN, f"{_WHERE}: is not self-signed")
    check_x509_signature(parsed.spki, parsed.algorithm, parsed.signature, parsed.signed, _WHERE)
    if now < parsed.not_before:
        raise RefusedEvidenceError(RefusedEvidenceReason.NOT_YET_VALID, f"{_WHERE}: begins at {parsed.not_before}")
    if now > parsed.not_after:
        raise RefusedEvidenceError(RefusedEvidenceReason.EXPIRED, f"{_WHERE}: ended at {parsed.not_after}")
    return appraise_evidence(evidence, policy, Binding(nonce, key, run, role), now)
