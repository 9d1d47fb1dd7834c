"""What the receiver answers to a frame: a receipt, that it was taken, or the error for which it was refused."""

import struct

from phalanx.config import canonical_json, printable
from phalanx.errors import (
    FrameError,
    OrderError,
    PeerLostError,
    PeerRefusedError,
    SignatureError,
    TransportError,
    VerificationError,
)
from phalanx.security.crypto import Peer, parse_canonical
from phalanx.transport.frame import SIGNATURE_BYTES, Receipt, SignedHeader
from phalanx.transport.receipts import is_receipt_due

MAX_ANSWER_BYTES = 4096
_PREFIX = struct.Struct(">4sBB")
_MAGIC = b"PHLA"
_VERSION = 2
_RECEIPT, _REFUSAL, _TAKEN = 0, 1, 2
_ERRORS: dict[str, type[TransportError | VerificationError]] = {
    error.__name__: error for error in (FrameError, OrderError, PeerLostError, PeerRefusedError, SignatureError)
}


def encode_receipt(receipt: Receipt | None) -> bytes:
    """Answer that a frame was accepted: with its receipt, or, when none is due yet, without."""
    if receipt is None:
        return _PREFIX.pack(_MAGIC, _VERSION, _TAKEN)
    return _PREFIX.pack(_MAGIC, _VERSION, _RECEIPT) + receipt.signature


def encode_refusal(error: TransportError | VerificationError) -> bytes:
    """Answer that a frame was refused, with the error's class name and text."""
    text = canonical_json({"error": type(error).__name__, "message": printable(str(error))})
    return _PREFIX.pack(_MAGIC, _VERSION, _REFUSAL) + text


def read_answer(answer: bytes, header: SignedHeader, peer: Peer) -> Receipt | None:
    """Return the checked receipt that an answer holds; None when it holds none and none is due.

    Raises:
        FrameError: The answer is malformed, lacks a receipt that is due, or the receiver found the frame malformed.
        SignatureError: The receipt is forged, or the receiver found the frame's signature to be so.
        OrderError, PeerRefusedError, PeerLostError: What the receiver refused for; lost means that its inbox
            stayed full, and may be tried again.
    """
    if not _PREFIX.size <= len(answer) <= MAX_ANSWER_BYTES:
        raise FrameError(f"answer of {peer.name}: has {len(answer)} bytes, expected 6 to {MAX_ANSWER_BYTES}")
    magic, version, status = _PREFIX.unpack_from(answer)
    content = answer[_PREFIX.size :]
    if magic != _MAGIC or version != _VERSION or status not in (_RECEIPT, _REFUSAL, _TAKEN):
        raise FrameError(f"answer of {peer.name}: is not of version {_VERSION}")
    if status == _REFUSAL:
        raise _read_refusal(content, peer)
    if status == _TAKEN:
        if content or is_receipt_due(header.fields):
            raise FrameError(f"answer of {peer.name}: has no receipt, and one is due for this frame")
        return None
    if len(content) != SIGNATURE_BYTES:
        raise FrameError(f"answer of {peer.name}: its receipt has {len(content)} bytes, expected {SIGNATURE_BYTES}")
    receipt = Receipt(peer.name, header.digest, content)
    receipt.verify(peer)
    return receipt


def _read_refusal(content: bytes, peer: Peer) -> TransportError | VerificationError:
    try:
        values = parse_canonical(content)
    except ValueError as exc:
        raise FrameError(f"answer of {peer.name}: {exc}") from exc
    name, message = values.get("error"), values.get("message")
    if len(values) != 2 or not isinstance(name, str) or not isinstance(message, str) or name not in _ERRORS:
        raise FrameError(f"answer of {peer.name}: is not an error of ours with its message")
    return _ERRORS[name](f"{peer.name} refused the frame: {printable(message)}")
