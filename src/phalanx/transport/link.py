"""The chain of headers on one link, as its sender writes it and as its receiver checks it, and what a link carries."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.errors import FrameError, OrderError
from phalanx.security.crypto import Identity
from phalanx.transport.config import TransportConfig
from phalanx.transport.frame import HeaderFields, Receipt, SignedHeader, frame_size, genesis, sign_header


class SendingChain:
    """The sender's chain: it numbers, chains and signs headers; not safe for several threads at once."""

    def __init__(self, identity: Identity, run: str, receiver: str, limits: TransportConfig) -> None:
        self._identity, self._run, self._receiver, self._limits = identity, run, receiver, limits
        self._sequence = 0
        self._previous = genesis(run, identity.name, receiver)

    def seal(self, kind: str, body: dict[str, Any], payload_size: int, payload_digest: str) -> SignedHeader:
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
        self._previous = header.digest
        return header


class ReceivingChain:
    """The receiver's chain: it accepts headers in the order in which they were sealed; not safe for several threads."""

    def __init__(self, run: str, sender: str, receiver: str) -> None:
        self._sender = sender
        self._next_sequence = 0
        self._previous = genesis(run, sender, receiver)
        self.last_receipt: Receipt | None = None
        """Of the last header that was accepted; None when none was due for it."""

    def check(self, header: SignedHeader) -> bool:
        """Check the place of a header with a sound signature; nothing is accepted yet.

        Returns:
            Whether it is the next header. False for the very last one again: the sender did not get its answer and
            asks once more, which is no attack and is not delivered twice.

        Raises:
            OrderError: Replayed, skipped, or sealed after another predecessor.
        """
        fields = header.fields
        if self._next_sequence and header.digest == self._previous:
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

    def accept(self, header: SignedHeader, receipt: Receipt | None) -> None:
        """Go on to the next place, after `check` returned True and a receipt that is due was signed."""
        self._next_sequence += 1
        self._previous = header.digest
        self.last_receipt = receipt


class Meter:
    """A meter that adds up the CPU time of the threads that measure with it; waiting costs nothing."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, purpose: str) -> Iterator[None]:
        """Add what the calling thread computes inside the block."""
        start = time.thread_time_ns()
        try:
            yield
        finally:
            spent = time.thread_time_ns() - start
            with self._lock:
                self._seconds[purpose] += spent

    def seconds(self, purpose: str) -> float:
        """Return the sum so far."""
        return self._seconds[purpose] * 1e-9
