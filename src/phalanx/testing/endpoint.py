"""An endpoint in an attacker's hands: everything it sends is properly signed, and nothing of it need be true."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import FrameError, PeerLostError
from phalanx.pipeline.protocol.messages import Assign, parse_message
from phalanx.security.crypto import Identity, Peer, certified_name, digest_hex
from phalanx.testing.actor import Actor, OutgoingMessage, WorkerCrash, rewrite_of
from phalanx.transport import (
    CheckedFrame,
    Endpoint,
    Handle,
    HeaderFields,
    LinkFault,
    SignedHeader,
    TransportConfig,
    Wire,
    sign_header,
)


class RewritingEndpoint(Endpoint):
    """An endpoint that sends what its actor makes of each message, and shows it assignments; it can be killed."""

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, Peer],
        run: str,
        wire: Wire,
        limits: TransportConfig,
        *,
        actor: Actor,
    ) -> None:
        self._rewrite, self._hear = rewrite_of(actor), actor.hear
        self._killed = threading.Event()
        super().__init__(identity, peers, run, wire, limits)

    def kill_party(self) -> None:
        """End the worker at the next thing that it wants from its endpoint; frames that are queued are lost."""
        self._killed.set()
        self.close()

    def send_frame(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """Sign and send what `rewrite` makes of a message.

        Returns:
            The header of the last message, which the liar's own record shows. A message to itself is
            signed and not sent; where there is none, what would have been sent is signed for its receiver.
        """
        messages = self._rewrite_message(receiver, kind, body, payload)
        header = None
        for outgoing in messages:
            to_itself = outgoing.receiver == self.party_name
            header = (
                super().seal_for_self(*_message_parts(outgoing))
                if to_itself
                else super().send_frame(outgoing.receiver, *_message_parts(outgoing))
            )
        if header is None:
            return self._sign_withheld(receiver, kind, body, payload)
        return header

    def _sign_withheld(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview]
    ) -> SignedHeader:
        """Sign a withheld message: the liar can still show it, and claim that it got lost."""
        data = b"".join(bytes(part) for part in payload)
        start = digest_hex(receiver.encode())
        fields = HeaderFields(
            self.session_name, kind, self.party_name, receiver, 0, start, len(data), digest_hex(data), body
        )
        return sign_header(self._identity, fields)

    def seal_for_self(
        self, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """As `send`, between two stages of this party."""
        messages = self._rewrite_message(self.party_name, kind, body, payload)
        return super().seal_for_self(*(_message_parts(messages[-1]) if messages else (kind, body, payload)))

    def receive_item(self, timeout_s: float) -> CheckedFrame | LinkFault | None:
        item = super().receive_item(timeout_s)
        self._check_alive()
        if isinstance(item, CheckedFrame) and item.kind == Assign.kind:
            # what is malformed is for the party itself to refuse
            with contextlib.suppress(FrameError):
                message = parse_message(item.kind, item.body)
                if isinstance(message, Assign):
                    self._hear(message)
        return item

    def _rewrite_message(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview]
    ) -> Sequence[OutgoingMessage]:
        self._check_alive()
        return self._rewrite(OutgoingMessage(receiver, parse_message(kind, body), b"".join(payload)))

    def _check_alive(self) -> None:
        if self._killed.is_set():
            raise WorkerCrash(self.party_name)


def _message_parts(outgoing: OutgoingMessage) -> tuple[str, dict[str, Any], tuple[bytes, ...]]:
    return outgoing.message.kind, outgoing.message.model_dump(mode="json"), (outgoing.payload,)


class MemoryNetwork:
    """A network that joins endpoints of one process, and gives each party its wire."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}

    def wire_for(self, name: str) -> "MemoryWire":
        """Return the wire of one party; its name is taken as proven."""
        return MemoryWire(self, name)


class MemoryWire:
    """A wire that delivers by calling the receiver's `handle` in the sender's thread."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network, self._name = network, name
        self._handle: Handle | None = None

    def serve_frames(self, handle: Handle, run: str) -> None:
        """Let others of the network reach this party."""
        self._handle = self._network.handles[self._name] = handle

    def add_route(self, name: str, address: str) -> None:
        """Do nothing: the network knows where every party is."""

    def deliver_frame(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
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
