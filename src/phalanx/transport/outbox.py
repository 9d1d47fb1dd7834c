"""The sender's side of one link: a bounded queue and the thread that delivers it in order."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import PeerGoneError, PeerLostError, PeerRefusedError, SignatureError, TransportError
from phalanx.security.crypto import Peer
from phalanx.transport.config import TransportConfig
from phalanx.transport.frame import Receipt, SignedHeader, encode_frame
from phalanx.transport.inbox import LinkFault
from phalanx.transport.link import CpuMeter, SendingChain, read_answer
from phalanx.transport.wire import Wire

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5
_GONE_S = 3.0
"""How long a receiver that answered before may refuse connections: a process that has ended never comes back to its
links.
"""


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes to send, hashed already.

    Attributes:
        buffers: Parts of the payload in order.
        size_bytes: Size in bytes of all parts together.
        digest: Digest over all parts in order.
    """

    buffers: Sequence[bytes | memoryview]
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class DeliveredFrame:
    """A frame that its receiver has taken.

    Attributes:
        receipt: The receiver's signature; None when none is due for this frame.
    """

    header: SignedHeader
    receipt: Receipt | None
    size_bytes: int


class Outbox:
    """An outbox that seals frames for one receiver and delivers them one after another.

    Args:
        chain: Chain of this link; owned by the outbox from now on.
        meter: Takes the time for signatures.
        report: Called in the delivering thread with each outcome; after a fault nothing more is sent.
    """

    def __init__(
        self,
        chain: SendingChain,
        peer: Peer,
        wire: Wire,
        limits: TransportConfig,
        meter: CpuMeter,
        *,
        report: Callable[[DeliveredFrame | LinkFault], None],
    ) -> None:
        self._chain, self._peer, self._wire, self._limits = chain, peer, wire, limits
        self._meter, self._report = meter, report
        self._queue: deque[tuple[SignedHeader, bytes]] = deque()
        self._queued_bytes = 0
        self._undelivered: list[tuple[SignedHeader, bytes]] = []
        self._error: TransportError | SignatureError | None = None
        self._reports_fault = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name=f"to-{peer.name}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a frame is under way, or word that none can be."""
        with self._changed:
            return bool(self._queue) or self._reports_fault

    def queue_frame(self, kind: str, body: dict[str, Any], payload: Payload) -> SignedHeader:
        """Seal a frame, copy its payload and queue it; waits while too much is queued already."""
        bound = self._limits.max_queued_bytes * (1 if payload.size_bytes else 2)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or not self._queued_bytes
                    or self._queued_bytes + payload.size_bytes <= bound
                ),
                self._limits.timeout_s,
            )
            self._check_open()
            if self._queued_bytes and self._queued_bytes + payload.size_bytes > bound:
                stuck = PeerLostError(
                    f"{self._peer.name}: {self._queued_bytes} bytes are queued and did not move "
                    f"for {self._limits.timeout_s:g} s"
                )
                self.fail_link(stuck)
                raise stuck
            with self._meter.measure_cpu_time("signing"):
                header = self._chain.seal_header(kind, body, payload.size_bytes, payload.digest)
            raw = encode_frame(header, payload.buffers)
            self._queue.append((header, raw))
            self._queued_bytes += len(raw)
            self._changed.notify_all()
        return header

    def put_aside(self, kind: str, body: dict[str, Any], payload: Payload) -> SignedHeader:
        """Seal a frame of a link that has failed; its bytes reach the receiver on another way, or not at all.

        Raises:
            PeerRefusedError: The receiver was evicted, or the link has not failed: a gap in it would break it.
        """
        with self._changed:
            if self._error is None:
                raise PeerRefusedError(f"{self._peer.name}: its link is open, so nothing is put aside")
            with self._meter.measure_cpu_time("signing"):
                return self._chain.seal_header(kind, body, payload.size_bytes, payload.digest)

    def take_undelivered(self) -> list[tuple[SignedHeader, bytes]]:
        """Hand out, once, the frames that were queued when the link failed; the first of them may have arrived."""
        with self._changed:
            undelivered, self._undelivered = self._undelivered, []
            return undelivered

    def wait_until_taken(self, timeout_s: float) -> None:
        """Wait until everything queued was taken; a link that failed has nothing queued."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, timeout_s)
            if self._queue:
                raise PeerLostError(f"{self._peer.name}: {len(self._queue)} frames have no answer yet")

    def drop_queue(self, error: TransportError | SignatureError) -> bool:
        """Forget the queue and send nothing more; returns whether the link was still open until now."""
        with self._changed:
            was_open = self._error is None
            if self._error is None:
                self._error = error
            self._queue.clear()
            self._queued_bytes = 0
            self._stop.set()
            self._changed.notify_all()
            return was_open

    def fail_link(self, error: TransportError | SignatureError) -> None:
        """End the link; queued frames can still be taken out."""
        with self._changed:
            queued = list(self._queue)
            was_open = self.drop_queue(error)
            if was_open:
                self._undelivered, self._reports_fault = queued, True
        if was_open:
            self._report(LinkFault(self._peer.name, error))
            self._reports_fault = False

    def join_thread(self, timeout_s: float) -> None:
        """Wait for the delivering thread to end, after `drop`."""
        self._thread.join(timeout_s)

    def _check_open(self) -> None:
        if isinstance(self._error, PeerRefusedError):
            raise PeerRefusedError(str(self._error))
        if self._error is not None:
            raise PeerLostError(f"{self._peer.name}: the link has failed: {self._error}")

    def _deliver_all(self) -> None:
        error: TransportError | SignatureError = PeerLostError(f"{self._peer.name}: its sending thread ended")
        try:
            while (item := self._next_frame()) is not None:
                header, raw = item
                self._report(DeliveredFrame(header, self._deliver_frame(header, raw), len(raw)))
                self._remove_taken(len(raw))
        except (TransportError, SignatureError) as exc:
            error = exc
        finally:
            # also on a bug of ours: a link that is silently dead would hang the run
            self.fail_link(error)

    def _next_frame(self) -> tuple[SignedHeader, bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._error is not None)
            return self._queue[0] if self._queue else None

    def _remove_taken(self, size_bytes: int) -> None:
        with self._changed:
            # evicted meanwhile: the queue is gone already
            if self._queue:
                self._queue.popleft()
                self._queued_bytes -= size_bytes
                self._changed.notify_all()

    def _deliver_frame(self, header: SignedHeader, raw: bytes) -> Receipt | None:
        deadline = time.monotonic() + self._limits.timeout_s
        pause_s, gone_since = _FIRST_PAUSE_S, math.inf
        while True:
            try:
                remaining_s = max(deadline - time.monotonic(), 0.001)
                answer = self._wire.deliver_frame(self._peer.name, raw, remaining_s)
                with self._meter.measure_cpu_time("signing"):
                    return read_answer(answer, header, self._peer)
            except PeerLostError as exc:
                now = time.monotonic()
                gone_since = min(gone_since, now) if isinstance(exc, PeerGoneError) else math.inf
                remaining_s = min(deadline, gone_since + _GONE_S) - now
                if remaining_s <= 0 or self._stop.wait(min(pause_s, remaining_s)):
                    raise PeerLostError(
                        f"{self._peer.name}: no answer to {header.fields.kind!r} within "
                        f"{_GONE_S if gone_since < math.inf else self._limits.timeout_s:g} s; last try: {exc}"
                    ) from exc
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
