"""Workers that come back: each life of a certificate is a party of its own, with chains, roles and words of its own."""

import threading
from collections import Counter
from collections.abc import Collection

from phalanx.errors import PeerRefusedError
from phalanx.security.crypto import certified_name, name_in_life
from phalanx.transport import Endpoint


class Incarnations:
    """Who is in which life, and who may begin another; asked by the wire's threads, told by the engine's.

    Args:
        endpoint: Gets to know a later life before its first word.
        names: Parties that take part already.
        returns: How often each certificate may come back in this session after it was lost or has left.

    Guarantees:
        Who was shut out for good, in whichever life, begins no other. Nothing of an earlier life is taken for a later
        one's: every frame has the name of its sender's life, signed.
    """

    def __init__(self, endpoint: Endpoint, names: Collection[str], returns: int) -> None:
        self._endpoint = endpoint
        self._returns = returns
        self._present = {certified_name(name): name for name in names}
        self._ended: Counter[str] = Counter()
        self._barred: set[str] = set()
        self._begun_anew: set[str] = set()
        self._lock = threading.Lock()

    def name_of(self, certified: str, begins: bool) -> str | None:
        """What the party of a certificate is called.

        Args:
            certified: Name in the certificate.
            begins: Whether its process has just begun, so that any earlier one has ended.

        Returns:
            None while an earlier life is still to be shut out.

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
                self._begun_anew.add(present)
                return None
            if self._ended[certified] > self._returns:
                raise PeerRefusedError(
                    f"{certified} was lost {self._ended[certified]} times in this session, and pipeline.returns is "
                    f"{self._returns}; it may come back when the run is resumed"
                )
            name = name_in_life(certified, self._ended[certified] + 1)
            self._endpoint.add_peer(first.called(name))
            return name

    def came(self, name: str) -> None:
        """A party has said its first word."""
        with self._lock:
            self._present[certified_name(name)] = name

    def ended(self, name: str, *, for_good: bool) -> None:
        """A party takes part no more."""
        with self._lock:
            certified = certified_name(name)
            if self._present.get(certified) == name:
                del self._present[certified]
                self._ended[certified] += 1
            self._begun_anew.discard(name)
            if for_good:
                self._barred.add(certified)

    def take_begun_anew(self) -> list[str]:
        """Hand out, once, the parties whose process has begun anew: their lives are over."""
        if not self._begun_anew:
            return []
        with self._lock:
            found, self._begun_anew = sorted(self._begun_anew), set()
            return found
