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
    Der,
)
from phalanx.security.tee.formats.reader import malformed
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
        raw: DER encoding of the whole certificate.
        signed: The part that the issuer signed.
        serial: Serial number; 0 is accepted.
        issuer: DER name; compared byte by byte.
        subject: DER of the subject's name.
        spki: DER of the public key.
        extensions: Critical or not, and value, by object identifier.
        algorithm: DER of the signature's algorithm.
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
    def name(self) -> str:
        """Common name of the subject, for messages and for the vendors' naming rules; empty if it has none."""
        return common_name(self.subject)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the certificate, in hex."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def key(self) -> PublicKey:
        """The public key."""
        return load_key(self.spki, f"certificate {self.name!r}")

    def extension(self, oid: str) -> bytes | None:
        """Return the value of an extension, or None."""
        extension = self.extensions.get(oid)
        return None if extension is None else extension[1]


@dataclass(frozen=True)
class RevocationList:
    """One X.509 revocation list, parsed and not verified.

    Attributes:
        issuer: DER of the issuer's name.
        next_update: When the next list is due.
        serials: Numbers of the revoked certificates.
        signed: The part that the issuer signed.
        algorithm: DER of the signature's algorithm.
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
    """Read one certificate from its DER, of so many bytes at most.

    Raises:
        RefusedEvidenceError: It is not exactly one X.509 version 3 certificate in DER.
    """
    if len(der) > limit:
        raise malformed(where, f"{len(der)} bytes, allowed {limit}")
    outer, signed, algorithm, signature = _open_envelope(der, where)
    version = outer.enter(0xA0)
    if version.integer() != 2:
        raise malformed(where, "is not X.509 version 3")
    version.end()
    serial = outer.integer()
    _check_same_algorithm(outer.whole(), algorithm, where)
    issuer = outer.whole()
    validity = outer.enter()
    not_before, not_after = validity.time(), validity.time()
    validity.end()
    subject, spki = outer.whole(), outer.whole()
    extensions = _read_extensions(outer, _EXTENSIONS, where)
    outer.end()
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
    if outer.integer() != 1:
        raise malformed(where, "is not of version 2")
    _check_same_algorithm(outer.whole(), algorithm, where)
    issuer = outer.whole()
    this_update = outer.time()
    if outer.peek() not in (UTC_TIME, GENERALIZED_TIME):
        raise malformed(where, "does not say when the next one is due")
    next_update = outer.time()
    serials = _read_revoked(outer.enter(), where) if outer.peek() == SEQUENCE else frozenset()
    extensions = _read_extensions(outer, 0xA0, where)
    outer.end()
    if any(critical for critical, _ in extensions.values()):
        raise malformed(where, "has a critical extension that is not understood here")
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
        raise malformed(where, f"expected 1 to {MAX_CERTIFICATES} PEM certificates and nothing else")
    return tuple(parse_certificate(_from_pem(block, where), where) for block in blocks[1:])


def common_name(name: bytes) -> str:
    """Return the common name in a DER name, or nothing."""
    attributes = Der(name, "name").enter()
    text = ""
    while attributes.more():
        attribute = attributes.enter(SET).enter()
        if attribute.oid() == _COMMON_NAME:
            text = attribute.any()[1].decode("utf-8", "replace")
    return text


def _from_pem(block: bytes, where: str) -> bytes:
    body, marker, rest = block.partition(_END)
    # Intel's quotes end their chain in a NUL
    if not marker or rest.strip(b"\r\n") not in (b"", b"\0"):
        raise malformed(where, "PEM certificate does not end, or something follows it")
    text = body.replace(b"\r", b"").replace(b"\n", b"")
    try:
        der = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise malformed(where, "PEM certificate is not base64") from exc
    if base64.b64encode(der) != text:
        raise malformed(where, "PEM certificate is base64 in another than its one form")
    return der


def _open_envelope(der: bytes, where: str) -> tuple[Der, bytes, bytes, bytes]:
    """Open SEQUENCE { signed, algorithm, signature }, the form of both; return a reader of the signed part first."""
    outermost = Der(der, where)
    holder = outermost.enter()
    outermost.end()
    signed, algorithm, signature = holder.whole(), holder.whole(), holder.bits()
    holder.end()
    return Der(signed, where).enter(), signed, algorithm, signature


def _check_same_algorithm(inner: bytes, outer: bytes, where: str) -> None:
    if inner != outer:
        raise malformed(where, "names two signature algorithms")


def _read_extensions(outer: Der, tag: int, where: str) -> dict[str, tuple[bool, bytes]]:
    extensions: dict[str, tuple[bool, bytes]] = {}
    if outer.peek() != tag:
        return extensions
    holder = outer.enter(tag)
    items = holder.enter()
    holder.end()
    while items.more():
        item = items.enter()
        oid = item.oid()
        critical = item.boolean() if item.peek() == BOOLEAN else False
        value = item.read(OCTET_STRING)
        item.end()
        if oid in extensions:
            raise malformed(where, f"has extension {oid} twice")
        extensions[oid] = (critical, value)
    return extensions


def _read_revoked(entries: Der, where: str) -> frozenset[int]:
    serials = set()
    while entries.more():
        entry = entries.enter()
        serials.add(entry.integer())
        entry.time()
        if entry.more():
            extensions = entry.enter()
            while extensions.more():
                extension = extensions.enter()
                extension.oid()
                if extension.peek() == BOOLEAN and extension.boolean():
                    raise malformed(where, "an entry has a critical extension")
        entry.end()
    return frozenset(serials)


def key_usage(certificate: Certificate) -> int | None:
    """Return the bits of the key usage, digital signature first (0x80), or None where there is no such extension."""
    value = certificate.extension(KEY_USAGE)
    if value is None:
        return None
    holder = Der(value, "key usage")
    content = holder.read(BIT_STRING)
    holder.end()
    if len(content) not in (2, 3):
        raise malformed(f"certificate {certificate.name!r}", "key usage")
    return content[1]


def authority(certificate: Certificate) -> tuple[bool, int | None]:
    """Return whether a certificate is an authority's, and how many authorities may follow below it."""
    value = certificate.extension(BASIC_CONSTRAINTS)
    if value is None:
        return False, None
    holder = Der(value, "basic constraints")
    content = holder.enter()
    holder.end()
    is_authority = content.boolean() if content.peek() == BOOLEAN else False
    length = content.integer() if content.more() else None
    content.end()
    return is_authority, length
