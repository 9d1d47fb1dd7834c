"""The interface between an endpoint and the network that carries its bytes, and a network without sockets."""

from collections.abc import Callable
from typing import Protocol

from phalanx.errors import PeerLostError
from phalanx.security.crypto import certified_name

Handle = Callable[[bytes | memoryview, str], bytes]


class Wire(Protocol):
    """A wire carries whole frames to named parties and brings back their answers.

    It knows which party is at the other end, but not what the bytes mean or whether they are true.
    """

    def serve(self, handle: Handle, run: str) -> None:
        """Start to pass arriving frames, each with the proven name of its sender, to `handle`."""
        ...

    def add_route(self, name: str, address: str) -> None:
        """Tell where a party is reached."""
        ...

    def deliver(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """Return the receiver's answer to one frame.

        Raises:
            PeerLostError: No answer came; it is not known whether the frame arrived. May be tried again.
            PeerRefusedError: The other end is not the party it should be, or does not let us in.
        """
        ...

    def close(self) -> None:
        """Stop; deliveries under way end with an error. Closing twice is harmless."""
        ...


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
