"""Checking signatures of certificates, reports and tokens; the arithmetic is the cryptography package's."""

from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import load_der_public_key

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.der import NULL, DerReader
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_ECDSA = {"1.2.840.10045.4.3.2": "sha256", "1.2.840.10045.4.3.3": "sha384", "1.2.840.10045.4.3.4": "sha512"}
_RSA = {"1.2.840.113549.1.1.11": "sha256", "1.2.840.113549.1.1.12": "sha384", "1.2.840.113549.1.1.13": "sha512"}
_RSA_PSS, _MGF1 = "1.2.840.113549.1.1.10", "1.2.840.113549.1.1.8"
_HASH_OIDS = {
    "2.16.840.1.101.3.4.2.1": "sha256",
    "2.16.840.1.101.3.4.2.2": "sha384",
    "2.16.840.1.101.3.4.2.3": "sha512",
}
HASHES: dict[str, hashes.HashAlgorithm] = {
    "sha256": hashes.SHA256(),
    "sha384": hashes.SHA384(),
    "sha512": hashes.SHA512(),
}
MIN_RSA_BITS = 2048
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


@lru_cache(maxsize=256)
def load_key(spki: bytes, where: str) -> PublicKey:
    """Load a public key from its SubjectPublicKeyInfo.

    Raises:
        RefusedEvidenceError: Malformed, another algorithm than ECDSA over a NIST curve or RSA, or RSA below 2048 bits.
    """
    try:
        key = load_der_public_key(spki)
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise malformed_error(where, "its public key cannot be read") from exc
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= MIN_RSA_BITS:
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES):
        return key
    raise malformed_error(where, "its key is neither ECDSA over a NIST curve nor RSA of at least 2048 bits")


@lru_cache(maxsize=256)
def check_x509_signature(spki: bytes, algorithm: bytes, signature: bytes, signed: bytes, where: str) -> None:
    """Check a signature in the form that certificates and revocation lists have.

    Successful checks are remembered: a vendor's chain is the same in every report.
    """
    key = load_key(spki, where)
    parameters = DerReader(algorithm, where).enter_element()
    oid = parameters.read_oid()
    try:
        if oid in _ECDSA and isinstance(key, ec.EllipticCurvePublicKey):
            parameters.check_end()
            key.verify(signature, signed, ec.ECDSA(HASHES[_ECDSA[oid]]))
        elif oid in _RSA and isinstance(key, rsa.RSAPublicKey):
            if parameters.read_content(NULL):
                raise malformed_error(where, "parameters of its signature algorithm")
            parameters.check_end()
            key.verify(signature, signed, padding.PKCS1v15(), HASHES[_RSA[oid]])
        elif oid == _RSA_PSS and isinstance(key, rsa.RSAPublicKey):
            digest, salt = _read_pss(parameters, where)
            key.verify(signature, signed, padding.PSS(padding.MGF1(digest), salt), digest)
        else:
            raise malformed_error(where, f"signature algorithm {oid} is not accepted for this key")
    except InvalidSignature as exc:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"{where}: the issuer's signature does not match"
        ) from exc


def check_ecdsa(key: PublicKey, curve: type[ec.EllipticCurve], r: int, s: int, signed: bytes, where: str) -> None:
    """Verify an ECDSA signature given as two numbers; the curve decides the hash."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, curve):
        raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_SIGNER, f"{where}: signed by a key of another kind")
    name = {256: "sha256", 384: "sha384", 521: "sha512"}[key.curve.key_size]
    try:
        key.verify(encode_dss_signature(r, s), signed, ec.ECDSA(HASHES[name]))
    except InvalidSignature as exc:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"{where}: the signature does not match"
        ) from exc


def check_raw_ecdsa(key: PublicKey, curve: type[ec.EllipticCurve], signature: bytes, signed: bytes, where: str) -> None:
    """Check an ECDSA signature written as r and s of equal length, most significant byte first."""
    half = len(signature) // 2
    r, s = int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")
    check_ecdsa(key, curve, r, s, signed, where)


def point_to_key(point: bytes, curve: ec.EllipticCurve, where: str) -> ec.EllipticCurvePublicKey:
    """Load a key from the two coordinates of its point."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(curve, b"\x04" + point)
    except ValueError as exc:
        raise malformed_error(where, "its key is no point of the curve") from exc


def _read_pss(parameters: DerReader, where: str) -> tuple[hashes.HashAlgorithm, int]:
    """Read RSASSA-PSS parameters: one hash for message and mask, the salt as long as the digest (RFC 4055)."""
    fields = parameters.enter_element()
    parameters.check_end()
    digest = _read_hash(fields.enter_element(0xA0), where)
    mask = fields.enter_element(0xA1).enter_element()
    salt = fields.enter_element(0xA2).read_integer()
    trailer = fields.enter_element(0xA3).read_integer() if fields.has_more() else 1
    fields.check_end()
    if mask.read_oid() != _MGF1 or _read_hash(mask, where) != digest or trailer != 1:
        raise malformed_error(where, "parameters of its PSS signature are not accepted")
    if salt != HASHES[digest].digest_size:
        raise malformed_error(where, f"PSS salt of {salt} bytes")
    return HASHES[digest], salt


def _read_hash(holder: DerReader, where: str) -> str:
    identifier = holder.enter_element()
    holder.check_end()
    name = _HASH_OIDS.get(identifier.read_oid())
    if identifier.has_more() and identifier.read_content(NULL):
        raise malformed_error(where, "parameters of a hash")
    identifier.check_end()
    if name is None:
        raise malformed_error(where, "a hash that is not accepted")
    return name
