"""A small certificate authority: throw-away for a local run, permanent for machines that join.

DIR/authority.pem       certificate of the authority, public
DIR/authority.key       its key, 0600
DIR/authority-ml-dsa-44.key   its second key, 0600
DIR/NAME/               0700
    certificate.pem     binds NAME to both keys
    authority.pem       a copy
    tls.key             ECDSA P-256, 0600; only where `issue` made the keys, for parties of this machine
    signing.key         Ed25519, 0600; the same
    signing-ml-dsa-44.key   ML-DSA-44, 0600; the same
"""

import ipaddress
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.errors import CertificateError
from phalanx.security.crypto.certificate import (
    certificate_facts,
    certificate_fingerprint,
    parse_authority,
    party_uri,
    peer_from_certificate,
    public_der,
    tls_server_name,
)
from phalanx.security.crypto.counter import lock_file
from phalanx.security.crypto.files import make_private_directory, read_public, write_private, write_public
from phalanx.security.crypto.identity import Identity, Peer, check_party_name
from phalanx.security.crypto.keys import (
    SIGNING_KEY,
    TLS_KEY,
    load_signing_key,
    load_tls_key,
    make_party_keys,
    new_tls_key,
    private_pem,
)
from phalanx.security.crypto.ml_dsa import (
    ML_DSA_EXTENSION,
    ML_DSA_KEY,
    bound_keys,
    load_ml_dsa_key,
    make_ml_dsa_key,
)
from phalanx.security.crypto.request import CheckedRequest, read_request
from phalanx.security.crypto.revocation import RevokedParties

CERTIFICATE = "certificate.pem"
_AUTHORITY_ML_DSA_KEY = "authority-ml-dsa-44.key"
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

    Raises:
        CertificateError: There is an authority already, or others can enter the directory.
    """
    make_private_directory(directory)
    key = new_tls_key()
    # the key file is the lock: the process that creates it first is the one authority here
    write_private(directory / "authority.key", private_pem(key))
    subject = _x509_name(f"phalanx authority {secrets.token_hex(4)}")
    start, expiry = _validity_period(days, now)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    ml_dsa_key = make_ml_dsa_key(directory / _AUTHORITY_ML_DSA_KEY).public_key().public_bytes_raw()
    certificate = (
        _certificate_builder(subject, subject, key.public_key(), start, expiry)
        .add_extension(x509.UnrecognizedExtension(ML_DSA_EXTENSION, ml_dsa_key), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(directory / "authority.pem", certificate.public_bytes(Encoding.PEM))


def issue_certificate(
    directory: Path,
    name: str,
    hosts: tuple[str, ...] = LOCAL_HOSTS,
    days: int = 90,
    now: datetime | None = None,
) -> Path:
    """Make keys and certificate of one party in ``directory/name``.

    Args:
        hosts: Further DNS names and addresses for tools other than Phalanx, which goes by the party name.
        days: Validity from `now`, cut to that of the authority.
        now: Time of issue; the clock's if None.

    Raises:
        CertificateError: Malformed name or host, no authority, or the party has keys already, or was revoked.
    """
    check_party_name(name)
    RevokedParties(directory).check_not_revoked(name)
    authority = _Authority(directory)
    home = directory / name
    if home.exists():
        raise CertificateError(f"{home}: exists already and is not overwritten; choose another name or move it away")
    names = [_general_name(host) for host in hosts]
    period = authority.validity_period(name, days, now)
    tls_key, signing_key, ml_dsa_key = make_party_keys(home)
    peer = Identity(name, signing_key, ml_dsa_key=ml_dsa_key).public
    write_private(home / "authority.pem", authority.pem)
    write_private(home / CERTIFICATE, authority.certify_party(peer, tls_key.public_key(), names, period))
    return home


def sign_request(
    directory: Path,
    pem: bytes,
    *,
    name: str | None = None,
    hosts: tuple[str, ...] = (),
    days: int = 90,
    now: datetime | None = None,
    where: str = "request",
) -> Path:
    """Certify the keys of a party that made them elsewhere, in ``directory/name``, where the certificate stays.

    Args:
        name: Name of the expected party; None accepts the name in the request.
        hosts: Host names, as in `issue`; a request itself cannot ask for any.

    Returns:
        The directory with the certificate, which holds no key. The same request gives the same certificate until
        that expires, and a new one for the same keys after that.

    Raises:
        CertificateError: The request is malformed, altered, of another party, for another authority, or without proof
            that its sender holds both keys; or the name has other keys, or a key another name; or one was revoked.
    """
    request = read_request(pem, where)
    peer = request.peer
    if name is not None and peer.name != name:
        raise CertificateError(f"{where}: is of {peer.name!r}, expected {name!r}")
    authority = _Authority(directory)
    if request.authority not in (None, certificate_fingerprint(authority.pem)):
        raise CertificateError(f"{where}: asks another authority, {request.authority}; this one is {directory}")
    names = [_general_name(host) for host in hosts]
    period = authority.validity_period(peer.name, days, now)
    home = directory / peer.name
    with lock_file(directory / "signing"):
        RevokedParties(directory).check_not_revoked(peer.name, peer)
        if not _has_certificate(directory, request, period[0], where):
            make_private_directory(home)
            write_public(home / "authority.pem", authority.pem)
            write_public(home / CERTIFICATE, authority.certify_party(peer, request.tls_key, names, period))
    return home


def _has_certificate(directory: Path, request: CheckedRequest, start: datetime, where: str) -> bool:
    """Tell whether a request was signed before and its certificate is still good.

    Raises:
        CertificateError: Its name is certified with other keys, or one of its keys with another name.
    """
    name, is_valid = request.peer.name, False
    for path in sorted(directory.glob(f"*/{CERTIFICATE}")):
        pem = read_public(path)
        facts, certificate = certificate_facts(pem, str(path)), x509.load_pem_x509_certificate(pem)
        if facts.peer is None:
            continue
        same = (facts.peer.public_key == request.peer.public_key, certificate.public_key() == request.tls_key)
        if facts.peer.name == name and same != (True, True):
            raise CertificateError(
                f"{where}: {name} is certified with other keys already, in {path}; invite it under another name, or "
                "move that directory away if its keys are lost"
            )
        if facts.peer.name != name and any(same):
            raise CertificateError(f"{where}: a key of it is that of {facts.peer.name} already; make new ones")
        is_valid |= facts.peer.name == name and facts.not_after > start + _CLOCK_SKEW
    return is_valid


class _Authority:
    """An authority with its key, as long as one certificate is made."""

    def __init__(self, directory: Path) -> None:
        self.pem = load_authority(directory / "authority.pem")
        self._path = directory / "authority.pem"
        self._certificate = x509.load_pem_x509_certificate(self.pem)
        self._key = load_tls_key(directory / "authority.key")
        if self._key.public_key() != self._certificate.public_key():
            raise CertificateError(f"{directory / 'authority.key'}: is not the key of authority.pem beside it")
        self._ml_dsa_key = load_ml_dsa_key(directory / _AUTHORITY_ML_DSA_KEY)

    def validity_period(self, name: str, days: int, now: datetime | None) -> tuple[datetime, datetime]:
        """Return from when to when a certificate that is made now is valid.

        Raises:
            CertificateError: The authority ends before that, or the days are out of bounds.
        """
        start, expiry = _validity_period(days, now)
        last = min(expiry, self._certificate.not_valid_after_utc)
        if last <= start:
            raise CertificateError(f"{self._path}: ends before the certificate of {name} would begin")
        return start, last

    def certify_party(
        self,
        peer: Peer,
        tls_key: ec.EllipticCurvePublicKey,
        hosts: list[x509.GeneralName],
        period: tuple[datetime, datetime],
    ) -> bytes:
        """Return a certificate that binds a party's name to both of its keys."""
        names = [
            x509.DNSName(tls_server_name(peer.name)),
            x509.UniformResourceIdentifier(party_uri(peer)),
            *hosts,
        ]
        builder = _certificate_builder(_x509_name(peer.name), self._certificate.subject, tls_key, *period)
        if self._ml_dsa_key is not None and peer.ml_dsa_key:
            statement = bound_keys(party_uri(peer), public_der(tls_key), peer.ml_dsa_key)
            value = peer.ml_dsa_key + self._ml_dsa_key.sign(statement)
            builder = builder.add_extension(x509.UnrecognizedExtension(ML_DSA_EXTENSION, value), critical=False)
        certificate = _add_party_extensions(builder, names, self._certificate).sign(self._key, hashes.SHA256())
        return certificate.public_bytes(Encoding.PEM)


def load_authority(path: Path) -> bytes:
    """Return the PEM of a currently valid authority."""
    pem = read_public(path)
    parse_authority(pem, str(path))
    return pem


def load_identity(directory: Path, now: datetime | None = None) -> Identity:
    """Load a party's own keys and certificate from the directory that `issue` made."""
    place = str(directory / CERTIFICATE)
    certificate_pem = read_public(directory / CERTIFICATE)
    authority_pem = read_public(directory / "authority.pem")
    parse_authority(authority_pem, str(directory / "authority.pem"), now)
    peer = peer_from_certificate(certificate_pem, authority_pem, now, place)
    signing_key = load_signing_key(directory / SIGNING_KEY)
    tls_key = load_tls_key(directory / TLS_KEY)
    if tls_key.public_key() != x509.load_pem_x509_certificate(certificate_pem).public_key():
        raise CertificateError(f"{directory / TLS_KEY}: is not the key of certificate.pem beside it")
    # a key that no authority has signed for is of no use to others
    ml_dsa_key = load_ml_dsa_key(directory / ML_DSA_KEY) if peer.ml_dsa_key else None
    identity = Identity(peer.name, signing_key, private_pem(tls_key), certificate_pem, authority_pem, ml_dsa_key)
    if identity.public != peer:
        raise CertificateError(f"{directory / SIGNING_KEY}: is not the message key in certificate.pem beside it")
    if identity.public.ml_dsa_key != peer.ml_dsa_key:
        raise CertificateError(f"{directory / ML_DSA_KEY}: is not the ML-DSA-44 key in certificate.pem beside it")
    return identity


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


def _validity_period(days: int, now: datetime | None) -> tuple[datetime, datetime]:
    if not 1 <= days <= _MAX_DAYS:
        raise CertificateError(f"days: found {days}, expected 1 to {_MAX_DAYS}")
    start = now or datetime.now(UTC)
    return start - _CLOCK_SKEW, start + timedelta(days=days)


def _certificate_builder(
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


def _x509_name(common_name: str) -> x509.Name:
    # RFC 5280 bounds a common name at 64 characters; a party name has at most 63
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
