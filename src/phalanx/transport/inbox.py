"""The one inbox of a party, and how much each peer may send into it."""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from phalanx.errors import FrameError, PeerLostError, PeerRefusedError, TransportError, VerificationError
from phalanx.transport.frame import MAX_SHOWN_HEADER_BYTES, SignedHeader

# what a queued frame costs beside its bytes, so that very small ones cannot be had for nothing
_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class CheckedFrame:
    """A frame that was checked: signature, place on its link, digest.

    Attributes:
        sender: The party that sent it.
        body: Kind-specific JSON object; its content is for the receiver to check.
        payload: Bytes of the payload, read-only memory.
        header: Signed header, which is kept as evidence.
    """

    sender: str
    kind: str
    body: dict[str, Any]
    payload: memoryview
    header: SignedHeader


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Sending to a party failed for good; nothing more goes to it."""

    peer: str
    error: TransportError | VerificationError


class Inbox:
    """First in, first out, over all senders; bounded for each sender, so that none can starve another.

    Args:
        max_queued_bytes: Bound for one sender. Frames without payload pass until twice this much: a verdict
            must not wait behind tensors.
    """

    def __init__(self, max_queued_bytes: int) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._items: deque[tuple[CheckedFrame | LinkFault, int]] = deque()
        self._queued: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._closed = False
        self._num_gets, self._is_waited_on = 0, False
        self._changed = threading.Condition()

    @property
    def waiting_call(self) -> int | None:
        """Number of the present call of `get_item`, while it waits; None while an item is there or no call waits.

        An observer that finds the same number twice knows that the reader did nothing in between.
        """
        with self._changed:
            return self._num_gets if self._is_waited_on and not self._items and not self._closed else None

    def put_frame(self, item: CheckedFrame, size_bytes: int, timeout_s: float) -> None:
        """Add a frame; waits while its sender has too much in here already.

        Raises:
            PeerLostError: There was no room within `timeout_s`, or the inbox is closed.
        """
        cost = size_bytes + _OVERHEAD_BYTES
        bound = self._max_queued_bytes if item.payload.nbytes else 2 * self._max_queued_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or item.sender in self._refused or self._fits_bound(item.sender, cost, bound),
                timeout_s,
            )
            if item.sender in self._refused:
                raise PeerRefusedError(f"{item.sender}: was evicted")
            if self._closed or not self._fits_bound(item.sender, cost, bound):
                raise PeerLostError(f"the inbox had no room for {size_bytes} bytes within {timeout_s:g} s")
            self._queued[item.sender] += cost
            self._items.append((item, cost))
            self._changed.notify_all()

    def put_fault(self, fault: LinkFault) -> None:
        """Add a local report; always passes."""
        with self._changed:
            self._items.append((fault, 0))
            self._changed.notify_all()

    def get_item(self, timeout_s: float) -> CheckedFrame | LinkFault | None:
        """Return the oldest item, or None when there is none within the time.

        Raises:
            PeerLostError: There is none, and none will come: the inbox is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._num_gets += 1
            while not self._items and not self._closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._is_waited_on = True
                self._changed.wait(remaining)
                self._is_waited_on = False
            if not self._items:
                raise PeerLostError("this party's own inbox is closed: nothing comes any more")
            item, cost = self._items.popleft()
            if isinstance(item, CheckedFrame):
                self._queued[item.sender] -= cost
                self._changed.notify_all()
            return item

    def cut_off(self, sender: str, fault: LinkFault) -> None:
        """Let nothing more of a sender in, drop what lies here of it, and report it before everything else."""
        with self._changed:
            self._refused.add(sender)
            remaining = [(item, cost) for item, cost in self._items if _sender_of(item) != sender]
            self._items = deque([(fault, 0), *remaining])
            self._queued[sender] = 0
            self._changed.notify_all()

    def refuse_sender(self, sender: str) -> None:
        """Accept no more frames of a sender; accepted ones stay."""
        with self._changed:
            self._refused.add(sender)
            self._changed.notify_all()

    def close(self) -> None:
        """Close the inbox and wake every thread that waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits_bound(self, sender: str, cost: int, bound: int) -> bool:
        return self._queued[sender] == 0 or self._queued[sender] + cost <= bound


def _sender_of(item: CheckedFrame | LinkFault) -> str | None:
    return item.sender if isinstance(item, CheckedFrame) else None


_REFUSAL_BYTES = 64 * 1024
"""Bytes of refused words that count as one refusal: as many more count as another, since they take longer to read."""


@dataclass(frozen=True)
class Allowance:
    """The most that one peer may send from one renewal to the next.

    Attributes:
        size_bytes: Size of these frames together.
        refusals: Frames that are refused, by the link or by the reader of the inbox.
    """

    messages: int
    size_bytes: int
    refusals: int


class Allowances:
    """A counter of each peer's frames, without a limit at first; safe to use from several threads.

    Guarantees:
        A peer that has once sent more stays cut off.
    """

    def __init__(self) -> None:
        self._each: Allowance | None = None
        self._judge: str | None = None
        self._messages: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._granted_messages: Counter[str] = Counter()
        self._granted_bytes: Counter[str] = Counter()
        self._out: dict[str, str] = {}
        self._exempt: set[str] = set()
        self._lock = threading.Lock()

    def limit_peers(self, each: Allowance) -> None:
        """Give every peer this allowance."""
        self._each = each

    def show_headers_to(self, judge: str) -> None:
        """Take no header that is too long to be shown to this party."""
        self._judge = judge

    def renew_all(self) -> None:
        """Begin to count anew, for another step or another attempt at one."""
        with self._lock:
            for count in (self._messages, self._bytes, self._refusals):
                count.clear()

    def exempt_peer(self, peer: str) -> None:
        """Let a peer send without a bound: a worker's owner, which the worker trusts."""
        with self._lock:
            self._exempt.add(peer)

    def grant_frames(self, peer: str, messages: int, size_bytes: int) -> None:
        """Let a peer send more, after a request to it; the allowance lasts until it is used."""
        with self._lock:
            self._granted_messages[peer] += messages
            self._granted_bytes[peer] += size_bytes

    def check_header(self, peer: str, size_bytes: int) -> None:
        """Refuse a header that is too long to be shown to the judge, unless it is the judge's own."""
        if self._judge not in (None, peer) and size_bytes > MAX_SHOWN_HEADER_BYTES:
            raise FrameError(
                f"{peer}: a header of {size_bytes} bytes cannot be shown to {self._judge}; "
                f"at most {MAX_SHOWN_HEADER_BYTES} are taken"
            )

    def spend_frame(self, peer: str, size_bytes: int) -> str | None:
        """Count one frame.

        Returns:
            Why it is one too many; None while it is not.
        """
        allowance = self._each
        if allowance is None or peer in self._exempt:
            return None
        with self._lock:
            self._messages[peer] += 1
            self._bytes[peer] += size_bytes
            self._use_allowance(self._messages, self._granted_messages, peer, allowance.messages)
            self._use_allowance(self._bytes, self._granted_bytes, peer, allowance.size_bytes)
            if self._messages[peer] > allowance.messages:
                self._out.setdefault(peer, f"more than {allowance.messages} messages in a step")
            if self._bytes[peer] > allowance.size_bytes:
                self._out.setdefault(peer, f"more than {allowance.size_bytes} bytes in a step")
            return self._out.get(peer)

    def spend_refusal(self, peer: str, size_bytes: int) -> str | None:
        """Count a refused frame by the number of bytes that had to be read of it; returns as `spend_frame`."""
        allowance = self._each
        if allowance is None or peer in self._exempt:
            return None
        with self._lock:
            self._refusals[peer] += 1 + size_bytes // _REFUSAL_BYTES
            if self._refusals[peer] > allowance.refusals:
                self._out.setdefault(peer, f"more than {allowance.refusals} refused messages in a step")
            return self._out.get(peer)

    @staticmethod
    def _use_allowance(counted: Counter[str], granted: Counter[str], peer: str, bound: int) -> None:
        used = min(max(counted[peer] - bound, 0), granted[peer])
        counted[peer] -= used
        granted[peer] -= used
