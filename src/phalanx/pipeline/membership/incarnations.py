"""Incarnations of workers that come back: each is a party of its own, with chains, roles and messages of its own."""

import threading
from collections import Counter
from collections.abc import Collection

from phalanx.errors import PeerRefusedError
from phalanx.security.crypto import certified_name, name_of_incarnation
from phalanx.transport import Endpoint


class Incarnations:
    """The present incarnation of each certificate; the wire's threads ask it, the engine's thread tells it.

    Args:
        endpoint: Gets to know a later incarnation before its first message.
        names: Parties that take part already.
        returns: How often each certificate may come back in this session after it was lost or has left.

    Guarantees:
        A party that was shut out for good, in any incarnation, begins no other. Nothing of an earlier incarnation is
        taken for a later one's: every frame has the signed name of its sender's incarnation.
    """

    def __init__(self, endpoint: Endpoint, names: Collection[str], returns: int) -> None:
        self._endpoint = endpoint
        self._returns = returns
        self._present = {certified_name(name): name for name in names}
        self._ended: Counter[str] = Counter()
        self._barred: set[str] = set()
        self._restarted: set[str] = set()
        self._lock = threading.Lock()

    def name_of(self, certified: str, begins: bool) -> str | None:
        """Return the name of a certificate's present or next incarnation.

        Args:
            certified: Name in the certificate.
            begins: Whether its process has just begun, so that any earlier one has ended.

        Returns:
            None while an earlier incarnation is still to be shut out.

        Raises:
            PeerRefusedError: It may not come back in this session.
        """
        with self._lock:
            present, first = self._present.get(certified), self._endpoint.peers.get(certified)
            if not begins or first is None:
                return present or certified
            if certified in self._barred:
                raise PeerRefusedError(f"{certified} was shut out and does not come back")
            if present is not None:
                self._restarted.add(present)
                return None
            if self._ended[certified] > self._returns:
                raise PeerRefusedError(
                    f"{certified} was lost {self._ended[certified]} times in this session, and pipeline.returns is "
                    f"{self._returns}; it may come back when the run is resumed"
                )
            name = name_of_incarnation(certified, self._ended[certified] + 1)
            self._endpoint.add_peer(first.called(name))
            return name

    def came(self, name: str) -> None:
        """Note that a party has sent its first message."""
        with self._lock:
            self._present[certified_name(name)] = name

    def ended(self, name: str, *, for_good: bool) -> None:
        """Note that a party takes part no more."""
        with self._lock:
            certified = certified_name(name)
            if self._present.get(certified) == name:
                del self._present[certified]
                self._ended[certified] += 1
            self._restarted.discard(name)
            if for_good:
                self._barred.add(certified)

    def take_restarted(self) -> list[str]:
        """Hand out, once, the parties with a process that has begun anew: their incarnations are over."""
        if not self._restarted:
            return []
        with self._lock:
            found, self._restarted = sorted(self._restarted), set()
            return found
