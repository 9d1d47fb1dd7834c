"""One direction of a channel in one epoch: its ciphers and its counter. It lives in one process and is never copied."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from phalanx.closing import Closeable
from phalanx.errors import SealError
from phalanx.security.crypto import in_domain
from phalanx.security.seal.context import Context, Direction, Purpose
from phalanx.security.seal.header import TAG_BYTES, FrameHeader, SealRefusal, count_chunks, header_size
from phalanx.security.seal.tensor import TensorKind


class BoundToProcess:
    """An object that refuses to be copied or pickled, and to work in a fork.

    Not found out: a snapshot of the whole machine that is started twice. Only an enclave that cannot be
    snapshotted excludes that.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Return in the process that made this object."""
        if os.getpid() != self._pid:
            raise SealError(SealRefusal.FORKED, "channel: belongs to the process that was forked; open another one")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is never copied or pickled: its nonces would be used twice")


Readable: TypeAlias = bytes | bytearray | memoryview
Writable: TypeAlias = bytearray | memoryview

MAX_CHUNKS = 2**32
"""Most chunks of one direction in one epoch: NIST SP 800-38D bounds the calls under one key; the counter has room."""
MAX_EPOCH = 2**32 - 1


class DirectionState(BoundToProcess):
    """The common part of sender and receiver of one direction in one epoch: its ciphers and its counter.

    Args:
        epoch: The sender's; 1 to 2^32 - 1.
        ciphers: One for each purpose, used by no other lane.
        max_chunks: After so many the lane is exhausted.

    Attributes:
        lock: Held while the counter is used.
        clock: Seconds; read before and after each call of the cipher. None, and nothing is measured.
        cipher_seconds: Seconds in the cipher alone so far, by that clock.
    """

    def __init__(
        self,
        context: Context,
        direction: Direction,
        epoch: int,
        ciphers: Mapping[Purpose, AESGCM],
        max_chunks: int = MAX_CHUNKS,
    ) -> None:
        if not 0 < epoch <= MAX_EPOCH or not 0 < max_chunks <= MAX_CHUNKS:
            raise SealError(SealRefusal.EXHAUSTED, f"epoch {epoch}: expected 1 to {MAX_EPOCH}; begin a new session")
        super().__init__()
        self.context, self.direction, self.epoch = context, direction, epoch
        self.counter, self.lock = 0, threading.Lock()
        self.clock: Callable[[], float] | None = None
        self.cipher_seconds = 0.0
        self._ciphers, self._max_chunks = dict(ciphers), max_chunks
        self._nonce_prefix = epoch.to_bytes(4, "big")
        self._about = in_domain("seal-chunk/1", context.encoded)

    def cipher_for(self, purpose: Purpose) -> AESGCM:
        """Return the cipher for a purpose.

        Raises:
            SealError: The lane was closed, or this process is a fork of the process that opened it, where the same
                nonces would be used once more.
        """
        self.check_process()
        cipher = self._ciphers.get(purpose)
        if cipher is None:
            raise SealError(SealRefusal.CLOSED, "channel: is closed; shake hands again for the next epoch")
        return cipher

    def next_header(self, kind: TensorKind, step: int, microbatch: int) -> FrameHeader:
        """Return the header of the next frame."""
        chunk_bytes = self.context.terms.chunk_bytes
        return FrameHeader(
            self.direction,
            self.context.session,
            self.epoch,
            self.counter,
            step,
            microbatch,
            chunk_bytes,
            count_chunks(kind.size_bytes, chunk_bytes),
            kind.encoded,
        )

    def check_counters_left(self, chunks: int) -> None:
        """Return when the lane has counters for so many chunks."""
        if self.counter + chunks > self._max_chunks:
            raise SealError(
                SealRefusal.EXHAUSTED,
                f"channel: {self.counter} of {self._max_chunks} chunks are used; shake hands again for the next epoch",
            )

    def chunk_nonce(self, counter: int) -> bytes:
        """Return the 12 bytes of a chunk: epoch, then counter."""
        return self._nonce_prefix + counter.to_bytes(8, "big")

    def associated_data(self, header: bytes) -> bytes:
        """Return the associated data of each chunk, without the chunk's index."""
        return self._about + header

    def close(self) -> None:
        """Drop the ciphers; OpenSSL clears their keys."""
        self._ciphers.clear()

    def __repr__(self) -> str:
        return f"Lane({self.direction.name}, epoch {self.epoch}, counter {self.counter})"


class DirectionEnd(Closeable):
    """One of the two ends of a direction, with what sender and receiver have in common."""

    def __init__(self, lane: DirectionState) -> None:
        self._direction_state = lane

    @property
    def sender_epoch(self) -> int:
        """The epoch of the side that sends."""
        return self._direction_state.epoch

    @property
    def cipher_seconds(self) -> float:
        """Seconds in the cipher alone so far, by the clock of `time_cipher`; 0 without a clock."""
        return self._direction_state.cipher_seconds

    def time_cipher(self, clock: Callable[[], float]) -> None:
        """Read a clock, of seconds, before and after each call of the cipher from now on."""
        self._direction_state.clock = clock

    def close(self) -> None:
        self._direction_state.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._direction_state!r})"


def frame_size(kind: TensorKind, chunk_bytes: int) -> int:
    """Return the bytes of a whole frame."""
    return header_size(kind.encoded) + kind.size_bytes + TAG_BYTES * count_chunks(kind.size_bytes, chunk_bytes)


def flat_view(buffer: Readable, what: str) -> memoryview:
    """View a buffer as one run of bytes, without a copy."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        # a shape with a zero in it cannot be cast
        return memoryview(bytearray())
    try:
        return view.cast("B")
    except (TypeError, ValueError) as exc:
        raise SealError(SealRefusal.MALFORMED, f"{what}: is not one run of bytes; make it contiguous") from exc
