"""A small certificate authority: throw-away for a local run, permanent for machines that join.

DIR/authority.pem       certificate of the authority, public
DIR/authority.key       its key, 0600
DIR/NAME/               0700, may be moved to the party's machine as a whole:
    certificate.pem     binds NAME to both keys
    tls.key             ECDSA P-256, 0600
    signing.key         Ed25519, 0600
    authority.pem       a copy
"""

import ipaddress
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.errors import CertificateError
from phalanx.security.crypto.certificate import (
    parse_authority,
    party_uri,
    peer_from_certificate,
    tls_server_name,
)
from phalanx.security.crypto.files import make_private_directory, read_private, read_public, write_private
from phalanx.security.crypto.identity import Identity, check_party_name

LOCAL_HOSTS = ("localhost", "127.0.0.1")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
# machines with clocks that differ by less than this can still talk from the first second
_CLOCK_SKEW = timedelta(minutes=5)
_MAX_DAYS = 36_500


def create_authority(directory: Path, days: int = 365, now: datetime | None = None) -> None:
    """Make the authority of one run or one group of owners.

    Args:
        directory: Made with mode 0700, or an existing one of that mode.
        days: Validity from `now`.
        now: Time of issue; the clock's if None.

    Raises:
        CertificateError: There is an authority already, or others can enter the directory.
    """
    make_private_directory(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    # the key file is the lock: the process that creates it first is the one authority here
    write_private(directory / "authority.key", _private_pem(key))
    subject = _name(f"phalanx authority {secrets.token_hex(4)}")
    start, end = _validity(days, now)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(subject, subject, key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(directory / "authority.pem", certificate.public_bytes(Encoding.PEM))


def issue(
    directory: Path,
    name: str,
    hosts: tuple[str, ...] = LOCAL_HOSTS,
    days: int = 90,
    now: datetime | None = None,
) -> Path:
    """Make keys and certificate of one party in ``directory/name``.

    Args:
        directory: Holds the authority.
        name: Party name.
        hosts: Further DNS names and addresses for tools other than Phalanx, which goes by the party name.
        days: Validity from `now`, cut to that of the authority.
        now: Time of issue; the clock's if None.

    Returns:
        The new directory.

    Raises:
        CertificateError: Malformed name or host, no authority, or the party has keys already.
    """
    check_party_name(name)
    alternatives = [_general_name(host) for host in hosts]
    authority_pem = load_authority(directory / "authority.pem")
    authority = x509.load_pem_x509_certificate(authority_pem)
    authority_key = _load_tls_key(directory / "authority.key")
    if authority_key.public_key() != authority.public_key():
        raise CertificateError(f"{directory / 'authority.key'}: is not the key of authority.pem beside it")
    home = directory / name
    if home.exists():
        raise CertificateError(f"{home}: exists already and is not overwritten; choose another name or move it away")
    tls_key, signing_key = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    party = Identity(name, signing_key).public
    names = [
        x509.DNSName(tls_server_name(name)),
        x509.UniformResourceIdentifier(party_uri(party)),
        *alternatives,
    ]
    start, end = _validity(days, now)
    last = min(end, authority.not_valid_after_utc)
    if last <= start:
        raise CertificateError(f"{directory / 'authority.pem'}: ends before the certificate of {name} would begin")
    certificate = _add_party_extensions(
        _builder(_name(name), authority.subject, tls_key.public_key(), start, last), names, authority
    ).sign(authority_key, hashes.SHA256())
    make_private_directory(home)
    write_private(home / "tls.key", _private_pem(tls_key))
    write_private(home / "signing.key", _private_pem(signing_key))
    write_private(home / "authority.pem", authority_pem)
    write_private(home / "certificate.pem", certificate.public_bytes(Encoding.PEM))
    return home


def load_authority(path: Path) -> bytes:
    """Return the PEM of a currently valid authority.

    Raises:
        CertificateError: Missing, malformed, expired, or not an authority's certificate.
    """
    pem = read_public(path)
    parse_authority(pem, str(path))
    return pem


def load_identity(directory: Path, now: datetime | None = None) -> Identity:
    """Load a party's own keys and certificate from the directory that `issue` made.

    Raises:
        CertificateError: A file is missing, malformed, expired, readable by others, or from another set.
    """
    where = str(directory / "certificate.pem")
    certificate_pem = read_public(directory / "certificate.pem")
    authority_pem = read_public(directory / "authority.pem")
    parse_authority(authority_pem, str(directory / "authority.pem"), now)
    peer = peer_from_certificate(certificate_pem, authority_pem, now, where)
    signing_key = _load_signing_key(directory / "signing.key")
    tls_key = _load_tls_key(directory / "tls.key")
    if tls_key.public_key() != x509.load_pem_x509_certificate(certificate_pem).public_key():
        raise CertificateError(f"{directory / 'tls.key'}: is not the key of certificate.pem beside it")
    identity = Identity(peer.name, signing_key, _private_pem(tls_key), certificate_pem, authority_pem)
    if identity.public != peer:
        raise CertificateError(f"{directory / 'signing.key'}: is not the message key in certificate.pem beside it")
    return identity


def _load_tls_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = _load_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: is not an ECDSA key")
    return key


def _load_signing_key(path: Path) -> ed25519.Ed25519PrivateKey:
    key = _load_key(path)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise CertificateError(f"{path}: is not an Ed25519 key")
    return key


def _load_key(path: Path) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(read_private(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise CertificateError(f"{path}: is not a readable, unencrypted PEM key") from exc


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    # a name in this zone is a claim to be a party, which only `name` may make
    if _HOST.fullmatch(host) is None or len(host) > 253 or host.lower().endswith("phalanx.internal"):
        raise CertificateError(
            f"host {host[:80]!r}: expected an address or a DNS name outside phalanx.internal, no wildcard"
        )
    return x509.DNSName(host)


def _validity(days: int, now: datetime | None) -> tuple[datetime, datetime]:
    if not 1 <= days <= _MAX_DAYS:
        raise CertificateError(f"days: found {days}, expected 1 to {_MAX_DAYS}")
    start = now or datetime.now(UTC)
    return start - _CLOCK_SKEW, start + timedelta(days=days)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _add_party_extensions(
    builder: x509.CertificateBuilder, names: list[x509.GeneralName], authority: x509.Certificate
) -> x509.CertificateBuilder:
    issuer_key = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key)
    roles = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(roles), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer, critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    # RFC 5280 bounds a common name at 64 characters; a party name has at most 63
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
