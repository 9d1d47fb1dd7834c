"""One link: the chain of its headers at sender and receiver, and the receipts that prove arrival."""

import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.config import canonical_json, printable_text
from phalanx.errors import (
    FrameError,
    OrderError,
    PeerLostError,
    PeerRefusedError,
    SignatureError,
    TransportError,
    VerificationError,
)
from phalanx.security.crypto import Identity, Peer, parse_canonical
from phalanx.transport.config import TransportConfig
from phalanx.transport.frame import (
    SIGNATURE_BYTES,
    HeaderFields,
    Receipt,
    SignedHeader,
    frame_size,
    genesis_digest,
    sign_header,
)


class SendingChain:
    """The sender's chain: it numbers, chains and signs headers; not safe for several threads at once."""

    def __init__(self, identity: Identity, run: str, receiver: str, limits: TransportConfig) -> None:
        self._identity, self._run, self._receiver, self._limits = identity, run, receiver, limits
        self._sequence = 0
        self._previous = genesis_digest(run, identity.name, receiver)

    def seal_header(self, kind: str, body: dict[str, Any], payload_size: int, payload_digest: str) -> SignedHeader:
        """Sign the next header of the link.

        Raises:
            FrameError: The receiver would refuse it, or the frame is too large; the chain stays as it was.
        """
        fields = HeaderFields(
            run=self._run,
            kind=kind,
            sender=self._identity.name,
            receiver=self._receiver,
            sequence=self._sequence,
            previous=self._previous,
            payload_size=payload_size,
            payload_digest=payload_digest,
            body=body,
        )
        header = sign_header(self._identity, fields)
        if (size_bytes := frame_size(header)) > self._limits.max_frame_bytes:
            raise FrameError(
                f"{kind!r} for {self._receiver}: takes {size_bytes} bytes, max_frame_bytes is "
                f"{self._limits.max_frame_bytes}; raise it on both sides or send less at once"
            )
        self._sequence += 1
        self._previous = header.header_digest
        return header


class ReceivingChain:
    """The receiver's chain: it accepts headers in the order in which they were sealed; not safe for several threads."""

    def __init__(self, run: str, sender: str, receiver: str) -> None:
        self._sender = sender
        self._next_sequence = 0
        self._previous = genesis_digest(run, sender, receiver)
        self.last_receipt: Receipt | None = None
        """Of the last header that was accepted; None when none was due for it."""

    def check_order(self, header: SignedHeader) -> bool:
        """Check the place of a header with a sound signature; nothing is accepted yet.

        Returns:
            Whether it is the next header. False for the very last one again: the sender did not get its answer and
            asks once more, which is no attack and is not delivered twice.

        Raises:
            OrderError: Replayed, skipped, or sealed after another predecessor.
        """
        fields = header.fields
        if self._next_sequence and header.header_digest == self._previous:
            return False
        if fields.sequence < self._next_sequence:
            raise OrderError(
                f"{self._sender}: header {fields.sequence} was replayed or sealed twice, expected {self._next_sequence}"
            )
        if fields.sequence > self._next_sequence:
            raise OrderError(f"{self._sender}: header {fields.sequence} came, expected {self._next_sequence} first")
        if fields.previous != self._previous:
            raise OrderError(f"{self._sender}: header {fields.sequence} was sealed after another predecessor")
        return True

    def accept_header(self, header: SignedHeader, receipt: Receipt | None) -> None:
        """Go on to the next place, after `check` returned True and a receipt that is due was signed."""
        self._next_sequence += 1
        self._previous = header.header_digest
        self.last_receipt = receipt


class CpuMeter:
    """A meter that adds up the CPU time of the threads that measure with it; waiting costs nothing."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def measure_cpu_time(self, purpose: str) -> Iterator[None]:
        """Measure the calling thread's computing time inside the block."""
        start = time.thread_time_ns()
        try:
            yield
        finally:
            spent = time.thread_time_ns() - start
            with self._lock:
                self._seconds[purpose] += spent

    def cpu_seconds(self, purpose: str) -> float:
        """Return the sum so far."""
        return self._seconds[purpose] * 1e-9


RECEIPT_EVERY = 16
"""At most so many frames of a link go by until the receiver signs again."""


def is_receipt_due(fields: HeaderFields) -> bool:
    """Whether the receiver must sign for this very frame; both ends know it from the header alone.

    Words (frames without payload) are signed for at once, tensors with the next receipt of their link: each header
    names its predecessor's digest and is accepted only after it, so a receipt speaks for every frame before it.
    """
    return fields.payload_size == 0 or fields.sequence % RECEIPT_EVERY == 0


@dataclass(frozen=True)
class ArrivalProof:
    """The proof that a frame has arrived.

    Attributes:
        receipt: Receipt of the last header of the chain.
        chain: Headers in order, from the frame's header to the header that the receipt names.
    """

    receipt: Receipt
    chain: tuple[SignedHeader, ...]

    def verify_arrival(self, peer: Peer) -> None:
        """Return when `peer` has signed for the first header of the chain.

        Raises:
            OrderError: The headers are no chain that ends at the receipt.
        """
        self.receipt.verify_receiver(peer)
        named = [*(header.fields.previous for header in self.chain[1:]), self.receipt.header_digest]
        if not self.chain or named != [header.header_digest for header in self.chain]:
            raise OrderError(f"proof of arrival at {peer.name}: its headers do not lead up to the receipt")


class Receipts:
    """The receipts of all frames sent; they grow until `forget_before` names frames that no dispute can be about."""

    def __init__(self) -> None:
        self._headers: dict[str, dict[int, SignedHeader]] = {}
        self._receipts: dict[str, dict[int, Receipt]] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Number of frames that are proven to have arrived."""
        return sum(self._find_proof(*place) is not None for place in self._places.values())

    def add_receipt(self, header: SignedHeader, receipt: Receipt | None) -> None:
        """Note that a frame was taken, with its receipt, which has been checked, where one was due."""
        fields = header.fields
        with self._changed:
            self._headers.setdefault(fields.receiver, {})[fields.sequence] = header
            self._places[header.header_digest] = (fields.receiver, fields.sequence)
            if receipt is not None:
                self._receipts.setdefault(fields.receiver, {})[fields.sequence] = receipt
                self._changed.notify_all()

    def get_proof(self, header_digest: str) -> ArrivalProof | None:
        """Return the proof that a frame arrived, or None while there is none."""
        with self._changed:
            place = self._places.get(header_digest)
            return None if place is None else self._find_proof(*place)

    def wait_for_proof(self, header_digest: str, timeout_s: float) -> ArrivalProof | None:
        """Return the proof that a frame arrived, or None when there is none within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self.get_proof(header_digest) is not None, timeout_s)
            return self.get_proof(header_digest)

    def forget_before(self, receiver: str, sequence: int) -> None:
        """Drop the records of one link for all frames before this number."""
        with self._changed:
            headers, receipts = self._headers.get(receiver, {}), self._receipts.get(receiver, {})
            # a link delivers in order, so the oldest comes first
            while headers and (oldest := next(iter(headers))) < sequence:
                del self._places[headers.pop(oldest).header_digest]
                receipts.pop(oldest, None)

    def _find_proof(self, receiver: str, sequence: int) -> ArrivalProof | None:
        receipts, headers = self._receipts.get(receiver, {}), self._headers[receiver]
        # a receipt is never further away than that
        for last in range(sequence, sequence + RECEIPT_EVERY):
            if last in receipts:
                return ArrivalProof(receipts[last], tuple(headers[n] for n in range(sequence, last + 1)))
        return None


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
    text = canonical_json({"error": type(error).__name__, "message": printable_text(str(error))})
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
    receipt = Receipt(peer.name, header.header_digest, content)
    receipt.verify_receiver(peer)
    return receipt


def _read_refusal(content: bytes, peer: Peer) -> TransportError | VerificationError:
    try:
        values = parse_canonical(content)
    except ValueError as exc:
        raise FrameError(f"answer of {peer.name}: {exc}") from exc
    name, message = values.get("error"), values.get("message")
    if len(values) != 2 or not isinstance(name, str) or not isinstance(message, str) or name not in _ERRORS:
        raise FrameError(f"answer of {peer.name}: is not an error of ours with its message")
    return _ERRORS[name](f"{peer.name} refused the frame: {printable_text(message)}")
