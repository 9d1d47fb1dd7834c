"""Certificates and revocation lists as vendors issue them, read strictly.

An own reader, because AMD issues keys with serial number 0, which libraries refuse or are about to (ADR 32).
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache

from phalanx.security.tee.formats.der import (
    BIT_STRING,
    BOOLEAN,
    GENERALIZED_TIME,
    OCTET_STRING,
    SEQUENCE,
    SET,
    UTC_TIME,
    DerReader,
)
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import PublicKey, load_key

BASIC_CONSTRAINTS, KEY_USAGE = "2.5.29.19", "2.5.29.15"
_COMMON_NAME = "2.5.4.3"
_EXTENSIONS = 0xA3
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
MAX_CERTIFICATES = 16
MAX_CERTIFICATE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Certificate:
    """One X.509 certificate, parsed and not verified.

    Attributes:
        serial: Serial number; 0 is accepted.
        issuer: DER name; compared byte by byte.
        spki: DER of the public key.
        extensions: Critical or not, and value, by object identifier.
    """

    raw: bytes = field(repr=False)
    signed: bytes = field(repr=False)
    serial: int
    issuer: bytes = field(repr=False)
    subject: bytes = field(repr=False)
    not_before: datetime
    not_after: datetime
    spki: bytes = field(repr=False)
    extensions: Mapping[str, tuple[bool, bytes]] = field(repr=False)
    algorithm: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    @cached_property
    def subject_name(self) -> str:
        """Common name of the subject, for messages and for the vendors' naming rules; empty if it has none."""
        return common_name(self.subject)

    @cached_property
    def sha256_hex(self) -> str:
        """SHA-256 over the certificate, in hex."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def public_key(self) -> PublicKey:
        """The public key."""
        return load_key(self.spki, f"certificate {self.subject_name!r}")

    def find_extension(self, oid: str) -> bytes | None:
        """Return the value of an extension, or None."""
        extension = self.extensions.get(oid)
        return None if extension is None else extension[1]


@dataclass(frozen=True)
class RevocationList:
    """One X.509 revocation list, parsed and not verified.

    Attributes:
        issuer: DER of the issuer's name.
        serials: Numbers of the revoked certificates.
    """

    issuer: bytes = field(repr=False)
    this_update: datetime
    next_update: datetime
    serials: frozenset[int]
    signed: bytes = field(repr=False)
    algorithm: bytes = field(repr=False)
    signature: bytes = field(repr=False)


@lru_cache(maxsize=128)
def parse_certificate(der: bytes, where: str = "certificate", limit: int = MAX_CERTIFICATE_BYTES) -> Certificate:
    """Read one certificate from its DER, of so many bytes at most."""
    if len(der) > limit:
        raise malformed_error(where, f"{len(der)} bytes, allowed {limit}")
    outer, signed, algorithm, signature = _open_envelope(der, where)
    version = outer.enter_element(0xA0)
    if version.read_integer() != 2:
        raise malformed_error(where, "is not X.509 version 3")
    version.check_end()
    serial = outer.read_integer()
    _check_same_algorithm(outer.read_encoding(), algorithm, where)
    issuer = outer.read_encoding()
    validity = outer.enter_element()
    not_before, not_after = validity.read_time(), validity.read_time()
    validity.check_end()
    subject, spki = outer.read_encoding(), outer.read_encoding()
    extensions = _read_extensions(outer, _EXTENSIONS, where)
    outer.check_end()
    return Certificate(
        der, signed, serial, issuer, subject, not_before, not_after, spki, extensions, algorithm, signature
    )


@lru_cache(maxsize=32)
def parse_crl(der: bytes, where: str = "revocation list") -> RevocationList:
    """Read one complete revocation list from its DER.

    Raises:
        RefusedEvidenceError: Malformed, without a next update, or with a critical extension (such as a delta list).
    """
    outer, signed, algorithm, signature = _open_envelope(der, where)
    if outer.read_integer() != 1:
        raise malformed_error(where, "is not of version 2")
    _check_same_algorithm(outer.read_encoding(), algorithm, where)
    issuer = outer.read_encoding()
    this_update = outer.read_time()
    if outer.peek_tag() not in (UTC_TIME, GENERALIZED_TIME):
        raise malformed_error(where, "does not say when the next one is due")
    next_update = outer.read_time()
    serials = _read_revoked(outer.enter_element(), where) if outer.peek_tag() == SEQUENCE else frozenset()
    extensions = _read_extensions(outer, 0xA0, where)
    outer.check_end()
    if any(critical for critical, _ in extensions.values()):
        raise malformed_error(where, "has a critical extension that is not understood here")
    return RevocationList(issuer, this_update, next_update, serials, signed, algorithm, signature)


def read_certificates(data: bytes, where: str) -> tuple[Certificate, ...]:
    """Read certificates from PEM, or one from DER.

    Raises:
        RefusedEvidenceError: Malformed, none, or more than 16.
    """
    if not data.lstrip().startswith(b"-----BEGIN"):
        return (parse_certificate(data, where),)
    blocks = data.split(_BEGIN)
    if blocks[0].strip() or len(blocks) > MAX_CERTIFICATES + 1:
        raise malformed_error(where, f"expected 1 to {MAX_CERTIFICATES} PEM certificates and nothing else")
    return tuple(parse_certificate(_from_pem(block, where), where) for block in blocks[1:])


def common_name(name: bytes) -> str:
    """Return the common name in a DER name, or nothing."""
    attributes = DerReader(name, "name").enter_element()
    text = ""
    while attributes.has_more():
        attribute = attributes.enter_element(SET).enter_element()
        if attribute.read_oid() == _COMMON_NAME:
            text = attribute.read_element()[1].decode("utf-8", "replace")
    return text


def _from_pem(block: bytes, where: str) -> bytes:
    body, marker, rest = block.partition(_END)
    # Intel's quotes end their chain in a NUL
    if not marker or rest.strip(b"\r\n") not in (b"", b"\0"):
        raise malformed_error(where, "PEM certificate does not end, or something follows it")
    text = body.replace(b"\r", b"").replace(b"\n", b"")
    try:
        der = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise malformed_error(where, "PEM certificate is not base64") from exc
    if base64.b64encode(der) != text:
        raise malformed_error(where, "PEM certificate is base64 in another than its one form")
    return der


def _open_envelope(der: bytes, where: str) -> tuple[DerReader, bytes, bytes, bytes]:
    """Open SEQUENCE { signed, algorithm, signature }, the form of both; return a reader of the signed part first."""
    outermost = DerReader(der, where)
    holder = outermost.enter_element()
    outermost.check_end()
    signed, algorithm, signature = holder.read_encoding(), holder.read_encoding(), holder.read_bits()
    holder.check_end()
    return DerReader(signed, where).enter_element(), signed, algorithm, signature


def _check_same_algorithm(inner: bytes, outer: bytes, where: str) -> None:
    if inner != outer:
        raise malformed_error(where, "names two signature algorithms")


def _read_extensions(outer: DerReader, tag: int, where: str) -> dict[str, tuple[bool, bytes]]:
    extensions: dict[str, tuple[bool, bytes]] = {}
    if outer.peek_tag() != tag:
        return extensions
    holder = outer.enter_element(tag)
    items = holder.enter_element()
    holder.check_end()
    while items.has_more():
        item = items.enter_element()
        oid = item.read_oid()
        critical = item.read_boolean() if item.peek_tag() == BOOLEAN else False
        value = item.read_content(OCTET_STRING)
        item.check_end()
        if oid in extensions:
            raise malformed_error(where, f"has extension {oid} twice")
        extensions[oid] = (critical, value)
    return extensions


def _read_revoked(entries: DerReader, where: str) -> frozenset[int]:
    serials = set()
    while entries.has_more():
        entry = entries.enter_element()
        serials.add(entry.read_integer())
        entry.read_time()
        if entry.has_more():
            extensions = entry.enter_element()
            while extensions.has_more():
                extension = extensions.enter_element()
                extension.read_oid()
                if extension.peek_tag() == BOOLEAN and extension.read_boolean():
                    raise malformed_error(where, "an entry has a critical extension")
        entry.check_end()
    return frozenset(serials)


def key_usage(certificate: Certificate) -> int | None:
    """Return the bits of the key usage, digital signature first (0x80), or None where there is no such extension."""
    value = certificate.find_extension(KEY_USAGE)
    if value is None:
        return None
    holder = DerReader(value, "key usage")
    content = holder.read_content(BIT_STRING)
    holder.check_end()
    if len(content) not in (2, 3):
        raise malformed_error(f"certificate {certificate.subject_name!r}", "key usage")
    return content[1]


def read_basic_constraints(certificate: Certificate) -> tuple[bool, int | None]:
    """Return whether a certificate is an authority's, and how many authorities may follow below it."""
    value = certificate.find_extension(BASIC_CONSTRAINTS)
    if value is None:
        return False, None
    holder = DerReader(value, "basic constraints")
    content = holder.enter_element()
    holder.check_end()
    is_authority = content.read_boolean() if content.peek_tag() == BOOLEAN else False
    length = content.read_integer() if content.has_more() else None
    content.check_end()
    return is_authority, length
