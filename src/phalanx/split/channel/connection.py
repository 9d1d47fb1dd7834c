"""A party's connection to the enclave: it sends requests and waits for their answers."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from phalanx.errors import FrameError, PeerLostError
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import PackedFrame, post_message
from phalanx.split.channel.message import SplitMessage
from phalanx.split.channel.messages import RefusedRequest, error_of, parse_message
from phalanx.transport import CheckedFrame, Endpoint, LinkFault

_LOOK_EVERY_S = 0.2
Answer = TypeVar("Answer", bound=SplitMessage)
Payload = Sequence[bytes | memoryview]
Aside = Callable[[SplitMessage], bool]
"""Takes a message that answers nothing, whenever it comes; False where it is none of those."""


class Connection:
    """One party's end of the connection.

    Args:
        timeout_s: Deadline for an answer, in seconds.
        look: Called while waiting; raises where the enclave's process has ended.
        aside: Takes messages that come without being asked for; there are none when left out.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: str,
        timeout_s: float,
        look: Callable[[], None],
        aside: Aside = lambda message: False,
    ) -> None:
        self._endpoint, self._peer, self._timeout_s, self._look = endpoint, peer, timeout_s, look
        self._handle_aside = aside
        self._pending: deque[CheckedFrame] = deque()

    @property
    def bytes_crossed(self) -> int:
        """Bytes of all frames so far, both ways."""
        return self._endpoint.bytes_sent.get(self._peer, 0) + self._endpoint.bytes_received.get(self._peer, 0)

    @property
    def transport_costs(self) -> Costs:
        """CPU time of the transport's digests and signatures so far."""
        return Costs(digest_s=self._endpoint.seconds_hashing, signing_s=self._endpoint.seconds_signing)

    def send_message(self, message: SplitMessage, payload: Payload = ()) -> None:
        """Send and go on."""
        self._endpoint.send_frame(self._peer, message.kind, message.model_dump(mode="json"), payload)

    def send_packed(self, message: SplitMessage, frame: PackedFrame) -> None:
        """Send a frame of a `FrameLink` and go on; raises as `send_message`."""
        post_message(self._endpoint, self._peer, message, frame)

    def await_message(self, answer: type[Answer]) -> tuple[Answer, memoryview]:
        """Wait for a message of this kind; raises as `await_one_of`."""
        return self.await_one_of((answer,))

    def peek_message(self, wanted: type[Answer]) -> Answer | None:
        """Return the oldest message if it is there and of this kind; another one is kept for the call that awaits it.

        Raises:
            PhalanxError: The enclave refused, with its error; or `PeerLostError`, the link has failed; or `FrameError`,
                the message is malformed.
        """
        item = self._pending[0] if self._pending else self._endpoint.receive_item(0.0)
        if item is None:
            return None
        if isinstance(item, LinkFault):
            raise PeerLostError(f"{self._peer}: {item.error}; continue with --resume")
        message = parse_message(item.kind, item.body)
        if isinstance(message, RefusedRequest):
            raise error_of(message, self._peer)
        if isinstance(message, wanted):
            if self._pending:
                self._pending.popleft()
            return message
        if not self._pending:
            self._pending.append(item)
        return None

    def handle_unrequested(self) -> None:
        """Take an unrequested message that has arrived; keep any other for the call that awaits it."""
        while (item := self._endpoint.receive_item(0.0)) is not None:
            if isinstance(item, LinkFault):
                raise PeerLostError(f"{self._peer}: {item.error}; continue with --resume")
            if not self._handle_aside(parse_message(item.kind, item.body)):
                self._pending.append(item)

    def await_one_of(
        self, answers: tuple[type[Answer], ...], meanwhile: Callable[[], None] | None = None
    ) -> tuple[Answer, memoryview]:
        """Wait for a message of one of these kinds; call `meanwhile` now and then.

        Raises:
            PhalanxError: The enclave refused, with its error; or `PeerLostError`, it is gone or silent; or
                `FrameError`, it said something else.
        """
        expected = " or ".join(repr(answer.kind) for answer in answers)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            item = self._pending.popleft() if self._pending else self._endpoint.receive_item(_LOOK_EVERY_S)
            if item is None:
                self._look()
                if meanwhile is not None:
                    meanwhile()
                continue
            if isinstance(item, LinkFault):
                self._look()
                raise PeerLostError(f"{self._peer}: {item.error}; continue with --resume")
            message = parse_message(item.kind, item.body)
            if isinstance(message, RefusedRequest):
                raise error_of(message, self._peer)
            if self._handle_aside(message):
                continue
            if not isinstance(message, answers):
                raise FrameError(f"{self._peer}: said {item.kind!r}, expected {expected}")
            return message, item.payload
        raise PeerLostError(
            f"{self._peer}: no {expected} within {self._timeout_s:g} s; raise split.step_timeout_s, then --resume"
        )

    def request_answer(
        self, message: SplitMessage, answer: type[Answer], payload: Payload = ()
    ) -> tuple[Answer, memoryview]:
        """Send, then wait for the answer."""
        self.send_message(message, payload)
        return self.await_message(answer)

    def set_enclave_address(self, address: str) -> None:
        """The enclave listens there."""
        self._endpoint.add_peer(self._endpoint.known_peers[self._peer], address)

    def flush_messages(self) -> None:
        """Wait until everything said was taken."""
        self._endpoint.flush_frames(self._timeout_s)
