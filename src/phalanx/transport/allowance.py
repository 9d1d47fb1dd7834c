"""Allowances bound what each peer may still send; they count before a frame is parsed, so that junk costs a link."""

import threading
from collections import Counter
from dataclasses import dataclass

_REFUSAL_BYTES = 64 * 1024
"""Bytes of refused words that count as one refusal: as many more count as another, since they take longer to read."""


@dataclass(frozen=True)
class Allowance:
    """The most that one peer may send from one renewal to the next.

    Attributes:
        messages: Frames.
        size_bytes: Of these frames together.
        refusals: Frames that are refused, by the link or by the reader of the inbox.
    """

    messages: int
    size_bytes: int
    refusals: int


class Allowances:
    """A counter of what each peer sends; safe to use from several threads.

    Attributes:
        each: What every peer may send; None, and everything passes.

    Guarantees:
        A peer that has once sent more stays cut off.
    """

    def __init__(self) -> None:
        self.each: Allowance | None = None
        self._messages: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._granted_messages: Counter[str] = Counter()
        self._granted_bytes: Counter[str] = Counter()
        self._out: dict[str, str] = {}
        self._exempt: set[str] = set()
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Begin to count anew, for another step or another attempt at one."""
        with self._lock:
            for count in (self._messages, self._bytes, self._refusals):
                count.clear()

    def exempt(self, peer: str) -> None:
        """Let a peer send without a bound: a worker's owner, which the worker trusts."""
        with self._lock:
            self._exempt.add(peer)

    def grant(self, peer: str, messages: int, size_bytes: int) -> None:
        """Let a peer send more, for it was asked to; what is granted lasts until it is used."""
        with self._lock:
            self._granted_messages[peer] += messages
            self._granted_bytes[peer] += size_bytes

    def spend(self, peer: str, size_bytes: int) -> str | None:
        """Count one frame.

        Returns:
            Why it is one too many; None while it is not.
        """
        each = self.each
        if each is None or peer in self._exempt:
            return None
        with self._lock:
            self._messages[peer] += 1
            self._bytes[peer] += size_bytes
            self._use(self._messages, self._granted_messages, peer, each.messages)
            self._use(self._bytes, self._granted_bytes, peer, each.size_bytes)
            if self._messages[peer] > each.messages:
                self._out.setdefault(peer, f"more than {each.messages} messages in a step")
            if self._bytes[peer] > each.size_bytes:
                self._out.setdefault(peer, f"more than {each.size_bytes} bytes in a step")
            return self._out.get(peer)

    def refuse(self, peer: str, size_bytes: int) -> str | None:
        """Count a frame that was refused, by the length of what had to be read of it; returns as `spend`."""
        each = self.each
        if each is None or peer in self._exempt:
            return None
        with self._lock:
            self._refusals[peer] += 1 + size_bytes // _REFUSAL_BYTES
            if self._refusals[peer] > each.refusals:
                self._out.setdefault(peer, f"more than {each.refusals} refused messages in a step")
            return self._out.get(peer)

    @staticmethod
    def _use(counted: Counter[str], granted: Counter[str], peer: str, bound: int) -> None:
        used = min(max(counted[peer] - bound, 0), granted[peer])
        counted[peer] -= used
        granted[peer] -= used
