"""Phalanx's certificates: their facts, and the checks before any of them is believed."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from phalanx.errors import CertificateError, SignatureError
from phalanx.security.crypto.clock import steady_now
from phalanx.security.crypto.identity import Peer, check_party_name
from phalanx.security.crypto.ml_dsa import bound_keys, read_ml_dsa_extension, verify_ml_dsa

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)
DIGEST_LENGTH = 64
_INTERNAL_SUFFIX = ".phalanx.internal"
_UNDERSTOOD = {ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE, ExtensionOID.EXTENDED_KEY_USAGE}
_BOTH_ROLES = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


@dataclass(frozen=True)
class CertificateFacts:
    """The facts that one certificate states, believed or not.

    Attributes:
        is_authority: Whether it may issue others.
        peer: The party; None for an authority.
        hosts: Further DNS names and addresses.
        not_before: First moment of validity, UTC.
        not_after: Last moment of validity, UTC.
    """

    subject: str
    is_authority: bool
    peer: Peer | None
    hosts: tuple[str, ...]
    not_before: datetime
    not_after: datetime


def tls_server_name(name: str) -> str:
    """Return the DNS name under which TLS proves that a server is this very party."""
    return check_party_name(name) + _INTERNAL_SUFFIX


def party_uri(peer: Peer) -> str:
    """Return the URI that binds the party's message key into its TLS certificate."""
    return f"phalanx://{peer.name}?ed25519={peer.public_key.hex()}"


def certificate_facts(pem: bytes, where: str = "certificate") -> CertificateFacts:
    """Read a certificate without checking its issuer or its dates.

    Raises:
        CertificateError: It is not one X.509 certificate of our form; the message starts with `where`.
    """
    return _read_facts(_parse_pem(pem, where), where)


def peer_from_certificate(
    pem: bytes, authority_pem: bytes, now: datetime | None = None, where: str = "certificate"
) -> Peer:
    """Return the party that a certificate names, after every check.

    Args:
        now: Time of the check; by `steady_now` if None.

    Raises:
        CertificateError: Malformed, from another authority, expired, not yet valid, not made for a party, or
            holding a critical extension that is not understood here.
    """
    certificate = _parse_pem(pem, where)
    authority = parse_authority(authority_pem, f"authority of {where}", now)
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as exc:
        raise CertificateError(
            f"{where}: not signed by {_common_name(authority)!r}; let that authority issue one"
        ).with_facts(
            code="PHX-V012",
            file=where,
            found="another signer",
            expected=f"signed by {_common_name(authority)}",
            do="let that authority issue one",
        ) from exc
    _check_time(certificate, now, where)
    peer = _read_facts(certificate, where).peer
    if peer is None:
        raise CertificateError(f"{where}: is an authority's, expected a party's")
    _check_party_form(certificate, where)
    return _with_trusted_key(peer, certificate, authority, where)


def _with_trusted_key(peer: Peer, certificate: x509.Certificate, authority: x509.Certificate, where: str) -> Peer:
    """Return the peer with its ML-DSA-44 key where the authority has signed for that by its own, else without."""
    trusted, _ = read_ml_dsa_extension(authority, f"authority of {where}")
    key, signature = read_ml_dsa_extension(certificate, where)
    if not (trusted and key):
        return replace(peer, ml_dsa_key=b"")
    try:
        verify_ml_dsa(trusted, signature, bound_keys(party_uri(peer), public_der(certificate.public_key()), key), where)
    except SignatureError as exc:
        raise CertificateError(
            f"{where}: the authority's ML-DSA-44 key did not sign for its keys; let the authority issue one"
        ) from exc
    return replace(peer, ml_dsa_key=key)


def public_der(key: PublicKeyTypes) -> bytes:
    """Return a public key as SubjectPublicKeyInfo in DER."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _check_authority(authority: x509.Certificate, now: datetime | None, where: str) -> None:
    facts = _read_facts(authority, where)
    usage = _read_extension(authority, x509.KeyUsage, where)
    if not facts.is_authority or not usage.key_cert_sign:
        raise CertificateError(f"{where}: is a party's certificate, expected an authority's")
    if not isinstance(authority.public_key(), ec.EllipticCurvePublicKey):
        raise CertificateError(f"{where}: expected an ECDSA key")
    _check_time(authority, now, where)


def certificate_fingerprint(pem: bytes, where: str = "certificate") -> str:
    """Return the SHA-256 of a certificate in hex, by which people and tokens tell it from others."""
    return _parse_pem(pem, where).fingerprint(hashes.SHA256()).hex()


def parse_authority(pem: bytes, where: str, now: datetime | None = None) -> x509.Certificate:
    """Parse the certificate of an authority and check it as of `now`, or of `steady_now`."""
    authority = _parse_pem(pem, where)
    _check_authority(authority, now, where)
    return authority


def _parse_pem(pem: bytes, where: str) -> x509.Certificate:
    # a bundle would leave it open which of its certificates is meant
    if pem.count(b"-----BEGIN") != 1:
        raise CertificateError(f"{where}: expected exactly one PEM certificate")
    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion) as exc:
        raise CertificateError(f"{where}: is not a readable X.509 certificate") from exc


def _read_facts(certificate: x509.Certificate, where: str) -> CertificateFacts:
    constraints = _read_extension(certificate, x509.BasicConstraints, where)
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _UNDERSTOOD:
            raise CertificateError(f"{where}: critical extension {extension.oid.dotted_string} is not understood")
    peer, hosts = (None, ()) if constraints.ca else _read_names(certificate, where)
    if peer is not None:
        peer = replace(peer, ml_dsa_key=read_ml_dsa_extension(certificate, where)[0])
    return CertificateFacts(
        subject=_common_name(certificate),
        is_authority=constraints.ca,
        peer=peer,
        hosts=hosts,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
    )


def party_from_names(names: x509.SubjectAlternativeName, where: str) -> tuple[Peer, tuple[str, ...]]:
    """Return the party that alternative names stand for, and the further hosts among them.

    Raises:
        CertificateError: They name no party, several, or one in two ways.
    """
    dns = names.get_values_for_type(x509.DNSName)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    internal = [name for name in dns if name.lower().endswith(_INTERNAL_SUFFIX)]
    if len(uris) != 1 or len(internal) != 1:
        raise CertificateError(
            f"{where}: names {len(uris)} parties by URI and {len(internal)} by DNS, expected one each; "
            "issue it with phalanx pki issue"
        )
    peer = _peer_from_uri(uris[0], where)
    if internal[0] != tls_server_name(peer.name):
        raise CertificateError(f"{where}: its URI names {peer.name!r}, its DNS name {internal[0]!r}")
    hosts = (*(name for name in dns if name != internal[0]), *addresses)
    return peer, hosts


def _read_names(certificate: x509.Certificate, where: str) -> tuple[Peer, tuple[str, ...]]:
    return party_from_names(_read_extension(certificate, x509.SubjectAlternativeName, where), where)


def _peer_from_uri(uri: str, where: str) -> Peer:
    try:
        parts = urlsplit(uri)
        keys = parse_qs(parts.query, strict_parsing=True).get("ed25519", [])
    except ValueError as exc:
        raise CertificateError(f"{where}: its URI is malformed") from exc
    if len(keys) != 1:
        raise CertificateError(f"{where}: its URI holds {len(keys)} message keys, expected one")
    peer = Peer.from_hex(check_party_name(parts.netloc), keys[0])
    if uri != party_uri(peer):
        raise CertificateError(f"{where}: its URI is not of the form phalanx://NAME?ed25519=HEX")
    return peer


def _check_party_form(certificate: x509.Certificate, where: str) -> None:
    roles = set(_read_extension(certificate, x509.ExtendedKeyUsage, where))
    usage = _read_extension(certificate, x509.KeyUsage, where)
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise CertificateError(f"{where}: its key is malformed") from exc
    if roles != _BOTH_ROLES or not usage.digital_signature or usage.key_cert_sign:
        raise CertificateError(f"{where}: its usage is not that of a party (TLS client and server, nothing else)")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError(f"{where}: expected an ECDSA P-256 key")


def _check_time(certificate: x509.Certificate, now: datetime | None, where: str) -> None:
    moment = now or steady_now()
    if moment < certificate.not_valid_before_utc:
        start = certificate.not_valid_before_utc.isoformat()
        raise CertificateError(f"{where}: not valid before {start}; check this machine's clock").with_facts(
            code="PHX-V013", file=where, do="check this machine's clock"
        )
    if moment > certificate.not_valid_after_utc:
        expiry = certificate.not_valid_after_utc.isoformat()
        raise CertificateError(
            f"{where}: expired at {expiry}; have a new one made with phalanx pki sign, or issue"
        ).with_facts(
            code="PHX-V013",
            file=where,
            found=f"expired at {expiry}",
            expected="a certificate that is in force",
            do="have a new one made with phalanx pki sign, or issue",
        )


def _read_extension(certificate: x509.Certificate, kind: type[_Extension], where: str) -> _Extension:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound as exc:
        raise CertificateError(f"{where}: has no {kind.__name__}, so it is not from phalanx pki") from exc
    except (
        ValueError,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        UnsupportedAlgorithm,
    ) as exc:
        raise CertificateError(f"{where}: its extensions are malformed") from exc


def _common_name(certificate: x509.Certificate) -> str:
    try:
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError as exc:
        raise CertificateError("certificate: its subject is malformed") from exc
    return str(names[0].value) if names else ""
