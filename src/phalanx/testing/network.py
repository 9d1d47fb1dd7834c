"""A network without sockets, which joins endpoints of one process."""

from phalanx.errors import PeerLostError
from phalanx.security.crypto import certified_name
from phalanx.transport import Handle


class MemoryNetwork:
    """A network that joins endpoints of one process, and gives each party its wire."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}

    def wire(self, name: str) -> "MemoryWire":
        """Return the wire of one party; its name is taken as proven."""
        return MemoryWire(self, name)


class MemoryWire:
    """A wire that delivers by calling the receiver's `handle` in the sender's thread."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network, self._name = network, name
        self._handle: Handle | None = None

    def serve(self, handle: Handle, run: str) -> None:
        """Let others of the network reach this party."""
        self._handle = self._network.handles[self._name] = handle

    def add_route(self, name: str, address: str) -> None:
        """Do nothing: the network knows where every party is."""

    def deliver(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """Return the receiver's answer to one frame.

        Raises:
            PeerLostError: No party of this name is on the network.
        """
        handle = self._network.handles.get(certified_name(receiver))
        if handle is None:
            raise PeerLostError(f"{receiver}: is not on the network")
        return handle(raw, self._name)

    def close(self) -> None:
        """Leave the network, unless a later incarnation of this party is on it by now."""
        if self._network.handles.get(self._name) == self._handle:
            self._network.handles.pop(self._name, None)
