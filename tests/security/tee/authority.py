"""A test's own certificate authority: it can play any vendor."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from published import moment

from phalanx.security.tee.formats.x509 import Certificate, parse_certificate

NOW = moment("2026-06-01")
_YEAR = timedelta(days=365)


@cache
def rsa_key(label: str) -> rsa.RSAPrivateKey:
    """A key by name: making one takes a while."""
    del label
    return rsa.generate_private_key(65537, 2048)


def name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])


@dataclass(frozen=True)
class Holder:
    """A party with a key and a certificate."""

    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def parsed(self) -> Certificate:
        return parse_certificate(self.der)

    def sign_builder(self, builder):
        if isinstance(self.key, rsa.RSAPrivateKey):
            scheme = padding.PSS(padding.MGF1(hashes.SHA384()), 48)
            return builder.sign(self.key, hashes.SHA384(), rsa_padding=scheme)
        digest = hashes.SHA384() if self.key.curve.key_size == 384 else hashes.SHA256()
        return builder.sign(self.key, digest)

    def crl(self, *serials: int, since: datetime = NOW - _YEAR, until: datetime = NOW + _YEAR) -> bytes:
        """A revocation list in DER."""
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(since).next_update(until)
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since).build()
            builder = builder.add_revoked_certificate(entry)
        return self.sign_builder(builder).public_bytes(Encoding.DER)


@dataclass(frozen=True)
class Form:
    """What a certificate says beside its names and key."""

    is_authority: bool = False
    path_length: int | None = None
    extensions: tuple[tuple[str, bytes], ...] = ()
    critical: tuple[str, ...] = ()
    since: datetime = NOW - _YEAR
    until: datetime = NOW + _YEAR
    signs: bool = True


def issue(subject: str, key, issuer: Holder | None = None, form: Form | None = None) -> Holder:
    """Issue a certificate; a root where there is no issuer."""
    form = form or Form(is_authority=issuer is None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(issuer.certificate.subject if issuer else name(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(form.since)
        .not_valid_after(form.until)
        .add_extension(x509.BasicConstraints(form.is_authority, form.path_length), critical=True)
        .add_extension(_usage(is_authority=form.is_authority and form.signs), critical=True)
    )
    for oid, value in form.extensions:
        extension = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)
        builder = builder.add_extension(extension, critical=oid in form.critical)
    maker = issuer or Holder(key, None)
    return Holder(key, maker.sign_builder(builder))


def p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def p384() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def tlv(tag: int, *parts: bytes) -> bytes:
    """One DER element."""
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def integer(value: int) -> bytes:
    return tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def oid(dotted: str) -> bytes:
    first, second, *rest = (int(arc) for arc in dotted.split("."))
    encoded = bytearray()
    for arc in (40 * first + second, *rest):
        groups = [arc & 0x7F]
        while arc := arc >> 7:
            groups.append(arc & 0x7F | 0x80)
        encoded += bytes(reversed(groups))
    return tlv(0x06, bytes(encoded))
