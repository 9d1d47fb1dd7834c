"""Signed headers as JSON, so that a party can pass on what another one signed."""

from typing import Any

from phalanx.errors import FrameError
from phalanx.pipeline.messages import Activation, Signed, parse_message
from phalanx.security.crypto import Peer
from phalanx.transport import HeaderFields, SignedHeader


def to_signed(header: SignedHeader) -> Signed:
    """Write a header as JSON text; nothing is re-encoded, so its signature still holds."""
    return Signed(header=header.header_bytes.decode(), signature=header.signature.hex())


def open_signed(signed: Signed, peer: Peer) -> SignedHeader:
    """Read a header that was passed on and check who signed it.

    Raises:
        FrameError: It is malformed.
        SignatureError: `peer` did not sign it.
    """
    try:
        header = SignedHeader(signed.header.encode(), bytes.fromhex(signed.signature))
    except ValueError as exc:
        raise FrameError(f"a passed-on header is malformed: {exc}") from exc
    header.verify(peer)
    return header


def passed_on(signed: Signed) -> tuple[HeaderFields, Activation]:
    """Read the header of a tensor between stages whose signature is checked later, if anything is made of it.

    Raises:
        FrameError: It is not the header of such a message.
    """
    try:
        fields = SignedHeader(signed.header.encode(), b"").fields
    except UnicodeEncodeError as exc:
        raise FrameError("a passed-on header is no text") from exc
    message = parse_message(fields.kind, fields.body)
    if not isinstance(message, Activation):
        raise FrameError(f"a passed-on header is of kind {fields.kind!r}, expected {Activation.kind!r}")
    return fields, message


def unverified_field(signed: Signed, name: str) -> Any:
    """Read one field of a header whose signature is checked later, if anything is made of it.

    Raises:
        FrameError: There is no such field.
    """
    try:
        return getattr(SignedHeader(signed.header.encode(), b"").fields, name)
    except (UnicodeEncodeError, AttributeError) as exc:
        raise FrameError(f"a passed-on header has no {name!r}") from exc
