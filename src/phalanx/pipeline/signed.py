"""Signed headers as JSON, so that a party can pass on what another one signed."""

import json
from typing import Any

from phalanx.errors import FrameError
from phalanx.pipeline.messages import Signed
from phalanx.security.crypto import Peer
from phalanx.transport import SignedHeader


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


def unverified_field(signed: Signed, name: str) -> Any:
    """Read one field of a header whose signature is checked later, if anything is ever made of it.

    Raises:
        FrameError: There is no such field.
    """
    try:
        return json.loads(signed.header)[name]
    except (ValueError, KeyError, TypeError) as exc:
        raise FrameError(f"a passed-on header has no {name!r}") from exc
