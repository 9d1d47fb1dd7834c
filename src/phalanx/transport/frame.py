"""One frame: what crosses between two parties, and its signed header, which is kept as evidence.

    "PHLX" | u8 version | u32 header length | header | 64-byte Ed25519 signature | payload

Numbers are big-endian. The header is canonical JSON and holds the payload's size and digest, so its signature
covers all of the frame.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from phalanx.config import StrictModel, canonical_json, printable_text
from phalanx.errors import CertificateError, FrameError, OutOfBoundsError, SignatureError
from phalanx.security.crypto import (
    DIGEST_PATTERN,
    Identity,
    Peer,
    check_session_name,
    digest_hex,
    in_domain,
    parse_canonical,
)
from phalanx.transport.config import TransportConfig

MAX_HEADER_BYTES = 1024 * 1024
MAX_SHOWN_HEADER_BYTES = MAX_HEADER_BYTES // 4
"""Longest header that can be shown to a third party within another one: as text in JSON it grows to twice as much."""
SIGNATURE_BYTES = 64
_PREFIX = struct.Struct(">4sBI")
_MAGIC = b"PHLX"
_VERSION = 1
_HEADER_DOMAIN = "frame/1"
_RECEIPT_DOMAIN = "receipt/1"
_RUN = re.compile(r"[!-~]{1,128}")
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class HeaderFields:
    """The fields of a header.

    Attributes:
        run: Session that the frame belongs to.
        kind: Meaning of the frame; decides the form of `body`.
        sequence: Number on this link, from 0.
        previous: Digest of the header before it on this link, or the link's genesis.
        payload_size: Length of the payload in bytes.
        payload_digest: BLAKE3 over them.
        body: JSON object; may be shared, so it is read and not changed.
    """

    run: str
    kind: str
    sender: str
    receiver: str
    sequence: int
    previous: str
    payload_size: int
    payload_digest: str
    body: dict[str, Any]


_TYPES = {
    "run": str,
    "kind": str,
    "sender": str,
    "receiver": str,
    "sequence": int,
    "previous": str,
    "payload_size": int,
    "payload_digest": str,
    "body": dict,
}


@dataclass(frozen=True)
class SignedHeader:
    """A header and its signature: proof of the sender's statement, without the payload.

    Attributes:
        header_bytes: Canonical JSON, exactly as signed.
        signature: 64 bytes.
    """

    header_bytes: bytes
    signature: bytes

    @cached_property
    def fields(self) -> HeaderFields:
        """The fields of the header."""
        if len(self.header_bytes) > MAX_HEADER_BYTES:
            raise FrameError(f"header: has {len(self.header_bytes)} bytes, at most {MAX_HEADER_BYTES} are allowed")
        try:
            values = parse_canonical(self.header_bytes)
        except ValueError as exc:
            raise FrameError(f"header: {exc}") from exc
        if values.keys() != _TYPES.keys():
            raise FrameError(f"header: its keys are not exactly {', '.join(_TYPES)}")
        for name, kind in _TYPES.items():
            # type() and not isinstance(): true is no number here
            if type(values[name]) is not kind:
                raise FrameError(f"header: {name} is a {type(values[name]).__name__}, expected {kind.__name__}")
        fields = HeaderFields(**values)
        if _RUN.fullmatch(fields.run) is None or _KIND.fullmatch(fields.kind) is None:
            raise FrameError("header: run or kind is malformed; expected 1 to 128 and 1 to 64 plain ASCII characters")
        try:
            check_session_name(fields.sender)
            check_session_name(fields.receiver)
        except CertificateError as exc:
            raise FrameError(f"header: {exc}") from exc
        if fields.sequence < 0 or fields.payload_size < 0:
            raise FrameError("header: sequence or payload_size is negative")
        if not (DIGEST_PATTERN.fullmatch(fields.previous) and DIGEST_PATTERN.fullmatch(fields.payload_digest)):
            raise FrameError("header: previous or payload_digest is not 64 lowercase hex characters")
        return fields

    @cached_property
    def header_digest(self) -> str:
        """Name of the header in chains and receipts."""
        return digest_hex(self.header_bytes)

    def verify_sender(self, peer: Peer) -> None:
        """Return when this peer is the sender and signed this header."""
        if self.fields.sender != peer.name:
            raise SignatureError(f"header of {self.fields.sender}: checked against the key of {peer.name}")
        peer.verify_signature(self.signature, in_domain(_HEADER_DOMAIN, self.header_bytes))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receiver's proof that it holds the bytes that a header names.

    Attributes:
        receiver: Party that signed the receipt.
        signature: 64 bytes.
    """

    receiver: str
    header_digest: str
    signature: bytes

    def verify_receiver(self, peer: Peer) -> None:
        """Return when this peer is the receiver and signed this receipt."""
        if self.receiver != peer.name or DIGEST_PATTERN.fullmatch(self.header_digest) is None:
            raise SignatureError(f"receipt of {self.receiver}: checked against the key of {peer.name}")
        peer.verify_signature(self.signature, in_domain(_RECEIPT_DOMAIN, bytes.fromhex(self.header_digest)))


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed frame with a signature, a place and a digest that are not checked yet.

    Attributes:
        payload: View into the received bytes, not a copy.
    """

    header: SignedHeader
    payload: memoryview


def genesis_digest(run: str, sender: str, receiver: str) -> str:
    """Return the predecessor digest of the first header of a link."""
    return digest_hex(in_domain("link/1", canonical_json([run, sender, receiver])))


def sign_header(identity: Identity, fields: HeaderFields) -> SignedHeader:
    """Encode and sign a header."""
    try:
        header_bytes = canonical_json({name: getattr(fields, name) for name in _TYPES})
    except (TypeError, ValueError, RecursionError) as exc:
        raise FrameError(f"header of {fields.kind!r}: its body is no JSON data: {exc}") from exc
    header = SignedHeader(header_bytes, identity.sign_data(in_domain(_HEADER_DOMAIN, header_bytes)))
    # read once as the receiver will, and kept
    _ = header.fields
    return header


def sign_receipt(identity: Identity, header_digest: str) -> Receipt:
    """State that the bytes that a header names have arrived."""
    signature = identity.sign_data(in_domain(_RECEIPT_DOMAIN, bytes.fromhex(header_digest)))
    return Receipt(identity.name, header_digest, signature)


def frame_size(header: SignedHeader) -> int:
    """Return the bytes of the whole frame that a header announces."""
    return _PREFIX.size + len(header.header_bytes) + SIGNATURE_BYTES + header.fields.payload_size


def encode_frame(header: SignedHeader, payload: Sequence[bytes | memoryview] = ()) -> bytes:
    """Join a header and its payload to the bytes of a frame: the only copy on the sender's side."""
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header.header_bytes))
    return b"".join((prefix, header.header_bytes, header.signature, *payload))


def parse_frame(data: bytes | memoryview, limits: TransportConfig) -> Frame:
    """Take a frame apart without believing any of it."""
    size_bytes = memoryview(data).nbytes
    if not _PREFIX.size + SIGNATURE_BYTES < size_bytes <= limits.max_frame_bytes:
        raise FrameError(f"frame: found {size_bytes} bytes, expected at most {limits.max_frame_bytes}, a header in it")
    try:
        view = memoryview(data).cast("B").toreadonly()
    except TypeError as exc:
        raise FrameError("frame: is not one run of bytes") from exc
    magic, version, header_size = _PREFIX.unpack_from(view)
    if magic != _MAGIC or version != _VERSION:
        raise FrameError(f"frame: is not of version {_VERSION}; both parties must run the same release")
    if not 0 < header_size <= MAX_HEADER_BYTES:
        raise FrameError(f"frame: its header has {header_size} bytes, expected 1 to {MAX_HEADER_BYTES}")
    header_end = _PREFIX.size + header_size
    payload_start = header_end + SIGNATURE_BYTES
    if payload_start > size_bytes:
        raise FrameError(f"frame: ends after {size_bytes} bytes, before its header of {header_size} does")
    header = SignedHeader(bytes(view[_PREFIX.size : header_end]), bytes(view[header_end:payload_start]))
    if header.fields.payload_size != size_bytes - payload_start:
        raise FrameError(
            f"frame: its payload has {size_bytes - payload_start} bytes, its header says {header.fields.payload_size}"
        )
    return Frame(header, view[payload_start:])


def check_payload(frame: Frame) -> None:
    """Raise unless the payload has the digest in the header.

    Raises:
        FrameError: It is not. This convicts no party: the sender, the link or a relay may have altered the bytes.
    """
    if digest_hex(frame.payload) != frame.header.fields.payload_digest:
        raise FrameError("frame: its bytes do not match the signed digest; the link is to be relayed")


_MAX_SHOWN = 3
_MAX_OF_A_PLACE = 60
_BOUNDS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "string_pattern_mismatch",
        "string_too_long",
        "string_too_short",
        "too_long",
        "too_short",
        "repeated",
    }
)
"""What pydantic, or a validator of ours, calls a value that is beyond its bounds.

Every other error may be the word of another release.
"""


class Body(StrictModel):
    """A frame's body; `kind` is the kind of the frame that has it, given as ``class Hello(Body, kind="hello")``."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls.kind = kind


_Body = TypeVar("_Body", bound=Body)


def bodies_by_kind(classes: Iterable[type[_Body]]) -> dict[str, type[_Body]]:
    """The bodies that the parties of one protocol know, by kind."""
    return {body_class.kind: body_class for body_class in classes}


def parse_body(known: Mapping[str, type[_Body]], kind: str, body: dict[str, Any]) -> _Body:
    """Parse a frame's body.

    Raises:
        OutOfBoundsError: All fields are there and of the right types, and values are beyond their bounds.
        FrameError: The kind is unknown, or a field is missing, unknown or of the wrong type.
    """
    if kind not in known:
        expected = ", ".join(sorted(known))
        raise FrameError(f"frame of kind {kind[:40]!r}: expected one of {expected}; run the same release")
    try:
        return known[kind].model_validate_json(canonical_json(body))
    except ValidationError as exc:
        beyond = all(error["type"] in _BOUNDS for error in exc.errors(include_url=False, include_input=False))
        error = OutOfBoundsError if beyond else FrameError
        raise error(f"frame of kind {kind!r}: its body is malformed; {_without_values(exc)}") from exc
    except ValueError as exc:
        raise FrameError(f"frame of kind {kind!r}: its body is malformed; {exc}") from exc


def _without_values(error: ValidationError) -> str:
    """Describe place and type of an error: no error message shows a peer's values."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_SHOWN]
    # a key that the peer chose is part of a place
    places = [
        printable_text(".".join(str(part) for part in error_entry["loc"]), _MAX_OF_A_PLACE) for error_entry in errors
    ]
    return "; ".join(
        f"{place}: {error_entry['msg']} ({error_entry['type']})"
        for place, error_entry in zip(places, errors, strict=True)
    )
