"""An endpoint in an attacker's hands: everything it sends is properly signed, and nothing of it need be true."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import Assign, parse_message
from phalanx.security.crypto import Identity, Peer, digest_hex
from phalanx.testing.actor import Actor, OutgoingMessage, WorkerCrash, rewrite_of
from phalanx.transport import (
    CheckedFrame,
    Endpoint,
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

    def kill(self) -> None:
        """End the worker at the next thing that it wants from its endpoint; frames that are queued are lost."""
        self._killed.set()
        self.close()

    def send(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """Sign and send what `rewrite` makes of a message.

        Returns:
            The header of the last message, which the liar's own record shows. A message to itself is
            signed and not sent; where there is none, what would have been sent is signed for its receiver.
        """
        messages = self._messages(receiver, kind, body, payload)
        header = None
        for outgoing in messages:
            to_itself = outgoing.receiver == self.name
            header = (
                super().seal_for_self(*_parts(outgoing))
                if to_itself
                else super().send(outgoing.receiver, *_parts(outgoing))
            )
        if header is None:
            return self._withheld(receiver, kind, body, payload)
        return header

    def _withheld(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview]
    ) -> SignedHeader:
        """Sign what is not sent: the liar can still show it, and say that it got lost."""
        data = b"".join(bytes(part) for part in payload)
        start = digest_hex(receiver.encode())
        fields = HeaderFields(self.run, kind, self.name, receiver, 0, start, len(data), digest_hex(data), body)
        return sign_header(self._identity, fields)

    def seal_for_self(
        self, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """As `send`, between two stages of this party."""
        messages = self._messages(self.name, kind, body, payload)
        return super().seal_for_self(*(_parts(messages[-1]) if messages else (kind, body, payload)))

    def receive(self, timeout_s: float) -> CheckedFrame | LinkFault | None:
        """As any endpoint.

        Raises:
            WorkerCrash: It was killed.
        """
        item = super().receive(timeout_s)
        self._check_alive()
        if isinstance(item, CheckedFrame) and item.kind == Assign.kind:
            # what is malformed is for the party itself to refuse
            with contextlib.suppress(FrameError):
                message = parse_message(item.kind, item.body)
                if isinstance(message, Assign):
                    self._hear(message)
        return item

    def _messages(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview]
    ) -> Sequence[OutgoingMessage]:
        self._check_alive()
        return self._rewrite(OutgoingMessage(receiver, parse_message(kind, body), b"".join(payload)))

    def _check_alive(self) -> None:
        if self._killed.is_set():
            raise WorkerCrash(self.name)


def _parts(outgoing: OutgoingMessage) -> tuple[str, dict[str, Any], tuple[bytes, ...]]:
    return outgoing.message.kind, outgoing.message.model_dump(mode="json"), (outgoing.payload,)
