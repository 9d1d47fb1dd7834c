"""An endpoint in an attacker's hands: everything it sends is properly signed, and nothing of it need be true."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import Assign, parse_message
from phalanx.security.crypto import Identity, Peer, digest_hex
from phalanx.testing.actor import Hear, Letter, Rewrite, WorkerCrash
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
    """An endpoint that sends what `rewrite` makes of each message, and shows `hear` assignments; it can be killed."""

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, Peer],
        run: str,
        wire: Wire,
        limits: TransportConfig,
        *,
        rewrite: Rewrite,
        hear: Hear = lambda assign: None,
    ) -> None:
        self._rewrite, self._hear = rewrite, hear
        self._killed = threading.Event()
        super().__init__(identity, peers, run, wire, limits)

    def kill(self) -> None:
        """End the worker at the next thing that it wants from its endpoint; frames that are queued are lost."""
        self._killed.set()
        self.close()

    def send(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """Sign and send what the letter was turned into.

        Returns:
            The header of the last letter: it is what the liar's own books show. A letter to itself is
            signed and not sent; where there is no letter, what would have been sent is signed for its receiver.
        """
        letters = self._letters(receiver, kind, body, payload)
        header = None
        for letter in letters:
            to_itself = letter.receiver == self.name
            header = (
                super().seal_for_self(*_parts(letter)) if to_itself else super().send(letter.receiver, *_parts(letter))
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
        letters = self._letters(self.name, kind, body, payload)
        return super().seal_for_self(*(_parts(letters[-1]) if letters else (kind, body, payload)))

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

    def _letters(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview]
    ) -> Sequence[Letter]:
        self._check_alive()
        return self._rewrite(Letter(receiver, parse_message(kind, body), b"".join(payload)))

    def _check_alive(self) -> None:
        if self._killed.is_set():
            raise WorkerCrash(self.name)


def _parts(letter: Letter) -> tuple[str, dict[str, Any], tuple[bytes, ...]]:
    return letter.message.kind, letter.message.model_dump(mode="json"), (letter.payload,)
