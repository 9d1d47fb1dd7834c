"""Certificate requests: a party's machine makes the keys, and asks an authority to certify their public halves.

A request is a PKCS#10 CSR. Its TLS key signs it; the URI in it names the party's message key, and one attribute holds
that key's signature over the name, both public keys and the authority that is asked. So both private keys were in one
hand, and that hand meant this name.
"""

import base64
import re
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from phalanx.errors import CertificateError, SignatureError
from phalanx.security.crypto.canonical import in_domain
from phalanx.security.crypto.certificate import (
    DIGEST_LENGTH,
    party_from_names,
    party_uri,
    public_der,
    tls_server_name,
)
from phalanx.security.crypto.identity import Identity, Peer, check_party_name
from phalanx.security.crypto.keys import SIGNING_KEY, TLS_KEY, load_signing_key, load_tls_key, make_party_keys
from phalanx.security.crypto.ml_dsa import (
    ML_DSA_KEY,
    ML_DSA_PUBLIC_BYTES,
    ML_DSA_REQUEST,
    bound_keys,
    load_ml_dsa_key,
    verify_ml_dsa,
)

MAX_REQUEST_BYTES = 12 * 1024
_PROOF = x509.ObjectIdentifier("2.25.193045189117995102402193016102027303324")
_PROOF_FORM = re.compile(rf"1 (?P<authority>[0-9a-f]{{{DIGEST_LENGTH}}}|-) (?P<signature>[0-9a-f]{{128}})", re.ASCII)
_FIELD = 2**255 - 19
_CURVE_D = -121665 * pow(121666, -1, _FIELD) % _FIELD


@dataclass(frozen=True)
class CheckedRequest:
    """A certificate request after every check that needs no authority.

    Attributes:
        authority: Fingerprint of the only authority that may answer; None for any.
    """

    peer: Peer
    tls_key: ec.EllipticCurvePublicKey
    authority: str | None


def make_request(home: Path, name: str, authority: str | None = None) -> bytes:
    """Return a request for the keys in a directory; they are made there when there are none.

    Args:
        authority: Fingerprint of the authority that is asked; None where it is not known yet.
    """
    check_party_name(name)
    if (home / TLS_KEY).exists() or (home / SIGNING_KEY).exists():
        tls_key, signing_key = load_tls_key(home / TLS_KEY), load_signing_key(home / SIGNING_KEY)
        ml_dsa_key = load_ml_dsa_key(home / ML_DSA_KEY)
    else:
        tls_key, signing_key, ml_dsa_key = make_party_keys(home)
    identity = Identity(name, signing_key, ml_dsa_key=ml_dsa_key)
    names = [
        x509.DNSName(tls_server_name(name)),
        x509.UniformResourceIdentifier(party_uri(identity.public)),
    ]
    proof = identity.sign_data(_proven_bytes(identity.public, tls_key.public_key(), authority))
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_attribute(_PROOF, f"1 {authority or '-'} {proof.hex()}".encode("ascii"))
    )
    if ml_dsa_key is not None:
        second = identity.public.ml_dsa_key
        proof = identity.sign_ml_dsa(_second_bytes(identity.public, tls_key.public_key(), second, authority))
        builder = builder.add_attribute(ML_DSA_REQUEST, base64.b64encode(second + proof))
    return builder.sign(tls_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def read_request(pem: bytes, where: str = "request") -> CheckedRequest:
    """Check a request as far as that needs no authority.

    Raises:
        CertificateError: It is no request of our form, it was altered, its keys are weak, or the sender has not shown
            that it holds both of them; the message starts with `where`.
    """
    request = _parse_request(pem, where)
    key = _tls_key(request, where)
    extensions = _read_extensions(request, where)
    if [type(extension.value) for extension in extensions] != [x509.SubjectAlternativeName]:
        raise CertificateError(f"{where}: asks for more or less than a party's names; make it with phalanx pki request")
    peer, hosts = party_from_names(extensions.get_extension_for_class(x509.SubjectAlternativeName).value, where)
    subject = [(attribute.oid, attribute.value) for attribute in request.subject]
    if subject != [(NameOID.COMMON_NAME, peer.name)]:
        raise CertificateError(f"{where}: its subject is not {peer.name!r}, which its URI names")
    if hosts:
        raise CertificateError(f"{where}: asks for the hosts {', '.join(hosts)[:200]}; hosts are named by who signs")
    if _has_small_order(peer.public_key):
        raise CertificateError(f"{where}: its message key is weak: everybody can sign with it")
    authority = _check_proof(request, peer, key, where)
    return CheckedRequest(replace(peer, ml_dsa_key=_check_second(request, peer, key, authority, where)), key, authority)


def _parse_request(pem: bytes, where: str) -> x509.CertificateSigningRequest:
    if len(pem) > MAX_REQUEST_BYTES or pem.count(b"-----BEGIN") != 1:
        raise CertificateError(f"{where}: expected exactly one PEM request of at most {MAX_REQUEST_BYTES} bytes")
    try:
        return x509.load_pem_x509_csr(pem)
    except (ValueError, x509.InvalidVersion) as exc:
        raise CertificateError(f"{where}: is not a readable certificate request; make it with pki request") from exc


def _tls_key(request: x509.CertificateSigningRequest, where: str) -> ec.EllipticCurvePublicKey:
    try:
        key = request.public_key()
        is_signed = request.is_signature_valid
        algorithm = request.signature_hash_algorithm
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as exc:
        raise CertificateError(f"{where}: its key or signature is malformed") from exc
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError(f"{where}: its TLS key is not ECDSA P-256")
    if not isinstance(algorithm, hashes.SHA256) or not is_signed:
        raise CertificateError(f"{where}: was altered, or was not signed by the TLS key in it")
    return key


def _read_extensions(request: x509.CertificateSigningRequest, where: str) -> x509.Extensions:
    try:
        return request.extensions
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm) as exc:
        raise CertificateError(f"{where}: its extensions are malformed") from exc


def _check_proof(
    request: x509.CertificateSigningRequest, peer: Peer, key: ec.EllipticCurvePublicKey, where: str
) -> str | None:
    """Check that the message key signed for this name, this TLS key and an authority, and return that authority."""
    try:
        values = [attribute.value for attribute in request.attributes if attribute.oid == _PROOF]
        proof = _PROOF_FORM.fullmatch(values[0].decode("ascii")) if len(values) == 1 else None
    except ValueError:
        proof = None
    if proof is None:
        raise CertificateError(f"{where}: does not show that its sender holds the message key of {peer.name}")
    authority = None if proof["authority"] == "-" else proof["authority"]
    try:
        peer.verify_signature(bytes.fromhex(proof["signature"]), _proven_bytes(peer, key, authority))
    except SignatureError as exc:
        raise CertificateError(
            f"{where}: the message key of {peer.name} did not sign for this name, TLS key and authority"
        ) from exc
    return authority


def _check_second(
    request: x509.CertificateSigningRequest,
    peer: Peer,
    key: ec.EllipticCurvePublicKey,
    authority: str | None,
    where: str,
) -> bytes:
    """Return the ML-DSA-44 key of a request, by which the same statement is signed; empty where it has none."""
    values = [attribute.value for attribute in request.attributes if attribute.oid == ML_DSA_REQUEST]
    if not values:
        return b""
    try:
        raw = base64.b64decode(values[0], validate=True)
        second, proof = raw[:ML_DSA_PUBLIC_BYTES], raw[ML_DSA_PUBLIC_BYTES:]
        verify_ml_dsa(second, proof, _second_bytes(peer, key, second, authority), where)
    except (ValueError, SignatureError) as exc:
        raise CertificateError(f"{where}: its ML-DSA-44 key did not sign for this name and these keys") from exc
    if len(values) > 1:
        raise CertificateError(f"{where}: has {len(values)} ML-DSA-44 keys")
    return second


def _second_bytes(peer: Peer, key: ec.EllipticCurvePublicKey, second: bytes, authority: str | None) -> bytes:
    return bound_keys(party_uri(peer), public_der(key), second, authority or "-")


def _proven_bytes(peer: Peer, key: ec.EllipticCurvePublicKey, authority: str | None) -> bytes:
    tls_key = public_der(key).hex()
    return in_domain("certificate-request/1", "\n".join((party_uri(peer), tls_key, authority or "-")).encode("ascii"))


def _has_small_order(public_key: bytes) -> bool:
    """Tell whether eight times the point of an Ed25519 key is zero, so that signatures under it show nothing.

    The points of order 1, 2 and 4 have y = 1, -1 and 0. One of order 8 doubles to y = 0, so y^2 = -x^2, and the curve
    -x^2 + y^2 = 1 + d x^2 y^2 becomes d y^4 + 2 y^2 - 1 = 0.
    """
    y = int.from_bytes(public_key, "little") % 2**255
    return y * (y * y - 1) * (_CURVE_D * y**4 + 2 * y * y - 1) % _FIELD == 0
