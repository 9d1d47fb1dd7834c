"""A party's mailbox: frames from the network, and messages between parts of the party itself."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

from phalanx.errors import FrameError, OutOfBoundsError, PeerLostError, PeerRefusedError, PhalanxError, TransportError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import CarriedFrames
from phalanx.pipeline.protocol.message import Message, ReceivedMessage
from phalanx.pipeline.protocol.messages import Activation, Carry, Fault, parse_message
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.security.crypto import Peer, digest_hex
from phalanx.transport import CheckedFrame, Endpoint, LinkFault, SignedHeader


class LinkRelay:
    """Both ends of the way around a link, and the owner in the middle.

    Guarantees:
        A message from `open` was signed by its sender for this party and session, and its payload is the signed one, as
        on any link; order and repetition are not checked here, as messages name their place. The owner relays between
        parties that it still listens to and sends to, and nothing under another's header.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.carried_frames = CarriedFrames()
        """As the owner: what was handed on."""
        self._endpoint = endpoint

    def relay_message(self, receiver: str, message: Message, payload: Sequence[memoryview]) -> SignedHeader:
        """Sign a message for a party behind a failed link and hand it to the owner, after the link's remaining ones.

        What is for the owner, or from it, has no way around: it is signed and goes nowhere.
        """
        self.send_undelivered(receiver)
        header = self._endpoint.put_aside(receiver, message.kind, message.model_dump(mode="json"), payload)
        self._send_to_owner(receiver, header, payload)
        return header

    def send_undelivered(self, receiver: str) -> None:
        """Hand a failed link's undelivered messages to the owner."""
        for header, payload in self._endpoint.take_undelivered(receiver):
            self._send_to_owner(receiver, header, (payload,))

    def forward_frame(self, frame: CheckedFrame, carry: Carry) -> SignedHeader | None:
        """As the owner: pass a frame on to its receiver.

        Returns:
            The frame's header where it has a value that nothing can have: such a frame convicts its bringer, which has
            signed it, and is not passed on.

        Raises:
            FrameError: It is not its bringer's own, of another session, altered or malformed.
        """
        header = self._statement_reader.open_frame_header(carry.header, (frame.sender, None))
        receiver = header.fields.receiver
        if header.fields.payload_digest != digest_hex(frame.payload):
            raise FrameError(f"{frame.sender!r} asks to relay an altered frame")
        try:
            self.carried_frames.note_frame(parse_message(header.fields.kind, header.fields.body), header)
        except OutOfBoundsError:
            return header
        except FrameError:
            # the receiver complains of what cannot be read
            pass
        # a receiver that is gone by now, or has lost its link to the owner too, is being replaced
        with contextlib.suppress(TransportError):
            self._endpoint.send_frame(receiver, carry.kind, carry.model_dump(mode="json"), (frame.payload,))
        return None

    def unwrap_frame(self, frame: CheckedFrame, carry: Carry) -> tuple[CheckedFrame, Message]:
        """As the receiver: take a frame out of the owner's hands as if it had come over its own link.

        Raises:
            FrameError: It does not come from the owner, is for another party, of another session, or malformed.
        """
        if frame.sender != OWNER:
            raise FrameError(f"{frame.sender!r} sent a frame of another party; only {OWNER!r} may")
        header = self._statement_reader.open_frame_header(carry.header, (None, self._endpoint.party_name))
        fields = header.fields
        if fields.payload_digest != digest_hex(frame.payload):
            raise FrameError(f"{frame.sender!r} sent an altered frame of {fields.sender!r}")
        inner = CheckedFrame(fields.sender, fields.kind, fields.body, frame.payload, header)
        message = parse_message(fields.kind, fields.body)
        if isinstance(message, Carry):
            raise FrameError(f"{fields.sender!r} sent a frame nested too deeply")
        return inner, message

    @property
    def _statement_reader(self) -> StatementReader:
        return StatementReader(self._endpoint.session_name, self._find_peer)

    def _find_peer(self, name: str) -> Peer:
        peer = self._endpoint.known_peers.get(name)
        if peer is None:
            raise PeerRefusedError(f"{name!r} is not a party of this run")
        return peer

    def _send_to_owner(self, receiver: str, header: SignedHeader, payload: Sequence[memoryview]) -> None:
        if OWNER in (self._endpoint.party_name, receiver):
            return
        carry = Carry(epoch=0, header=to_signed(header))
        # without a link to the owner this party ends as soon as it reads its mail
        with contextlib.suppress(PhalanxError):
            self._endpoint.send_frame(OWNER, carry.kind, carry.model_dump(mode="json"), payload)


_RECEIPTS_KEPT = 1024
"""Receipts that are kept per link; more than a step has."""


_MAX_AT_ONCE = 1024
"""Messages that are taken without looking at deadlines and silences."""


class Mailbox:
    """A mailbox sends to others over the endpoint, to its own party through a queue, and parses each frame once."""

    def __init__(self, endpoint: Endpoint, *, seals_own: bool = False) -> None:
        """`seals_own`: whether tensors between this party's own stages are signed; the owner is trusted."""
        self._seals_own = seals_own
        self._me = me = endpoint.public_peer
        self._name = me.name
        self._endpoint = endpoint
        self._link_relay = LinkRelay(endpoint)
        self._local: deque[ReceivedMessage] = deque()
        self._waiting: deque[ReceivedMessage | LinkFault] = deque()

    def post_message(self, receiver: str, message: Message, payload: Sequence[memoryview] = ()) -> SignedHeader | None:
        """Send one message; where the link has failed, a worker's goes by way of the owner.

        A link that fails raises nothing here: the fault arrives in the mailbox, and its handler decides what follows.

        Raises:
            PeerRefusedError: The receiver is unknown, or was evicted by this party.

        Returns:
            The signed header; None for a message to oneself that need not be signed.
        """
        if receiver != self._name:
            try:
                header = self._endpoint.send_frame(receiver, message.kind, message.model_dump(mode="json"), payload)
            except (PeerLostError, PeerRefusedError):
                return self._link_relay.relay_message(receiver, message, payload)
            sequence = header.fields.sequence
            if sequence % _RECEIPTS_KEPT == 0:
                self._endpoint.receipts.forget_before(header.fields.receiver, sequence - _RECEIPTS_KEPT)
            return header
        sealed: SignedHeader | None = None
        if self._seals_own and isinstance(message, Activation):
            # what one worker's stages say to each other is audited like everything else
            sealed = self._endpoint.seal_for_self(message.kind, message.model_dump(mode="json"), payload)
        data = memoryview(b"".join(payload)) if len(payload) != 1 else payload[0]
        self._local.append(ReceivedMessage(self._name, message, data, sealed))
        return sealed

    @property
    def carried_frames(self) -> CarriedFrames:
        """As the owner: what went by its way between workers."""
        return self._link_relay.carried_frames

    def leave_link(self, receiver: str) -> None:
        """Send by way of the owner from now on, including undelivered messages of the link."""
        self._endpoint.end_link(receiver, "the owner relays this link")

    def renew_allowances(self) -> None:
        """Let every party send as much again: another step, or another attempt at one, begins."""
        self._endpoint.allowances.renew_all()
        self.carried_frames.begin_attempt()

    def count_refused(self, received: ReceivedMessage) -> None:
        """Count a message that its reader could make nothing of."""
        if received.header is not None and received.sender != self._name:
            self._endpoint.count_refusal(received.sender, len(received.header.header_bytes))

    def find_peer(self, name: str) -> Peer:
        """The public key of a party, this one included."""
        peer = self._me if name == self._name else self._endpoint.known_peers.get(name)
        if peer is None:
            raise PeerRefusedError(f"{name!r} is not a party of this run")
        return peer

    @property
    def statement_reader(self) -> StatementReader:
        """The reader of headers that others pass on, in this session."""
        return StatementReader(self._endpoint.session_name, self.find_peer)

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be handled."""
        return bool(self._local or self._waiting)

    def drain_local(self) -> Iterator[ReceivedMessage]:
        """Take this party's messages to itself."""
        while self._local:
            yield self._local.popleft()

    def drain_messages(self) -> Iterator[ReceivedMessage | LinkFault]:
        """Take received messages; of a flood only a part at once, so that the reader looks up in between."""
        yield from self.drain_local()
        for _ in range(_MAX_AT_ONCE):
            if not self.wait_for_mail(0.0):
                break
            yield self._waiting.popleft()
        yield from self.drain_local()

    def wait_for_mail(self, timeout_s: float) -> bool:
        """Wait until something has arrived from the network; False when the time is up."""
        if self._waiting:
            return True
        for _ in range(_MAX_AT_ONCE):
            item = None if self._waiting else self._endpoint.receive_item(timeout_s)
            if item is None:
                break
            timeout_s = 0.0
            self._take_item(item)
        return bool(self._waiting)

    def _take_item(self, item: CheckedFrame | LinkFault) -> None:
        if isinstance(item, LinkFault):
            self._link_relay.send_undelivered(item.peer)
            self._waiting.append(item)
            return
        frame = item
        try:
            message = parse_message(frame.kind, frame.body)
            if isinstance(message, Carry) and self._name == OWNER:
                nonsense = self._link_relay.forward_frame(frame, message)
                if nonsense is not None:
                    self._refuse_frame(item, OutOfBoundsError("it asks to relay an impossible value"), nonsense)
                return
            if isinstance(message, Carry):
                frame, message = self._link_relay.unwrap_frame(frame, message)
        except PhalanxError as exc:
            # what a peer sends must not stop its reader
            # a value that nothing can have, under its sender's own signature, speaks for itself
            self._refuse_frame(item, exc, frame.header if isinstance(exc, OutOfBoundsError) and item is frame else None)
            return
        self._waiting.append(ReceivedMessage(frame.sender, message, frame.payload, frame.header))

    def _refuse_frame(self, item: CheckedFrame, error: PhalanxError, nonsense: SignedHeader | None) -> None:
        """Report a frame, with the header that convicts its signer where there is one."""
        self._endpoint.count_refusal(item.sender, len(item.header.header_bytes))
        evidence = None if nonsense is None else to_signed(nonsense)
        fault = Fault(epoch=0, about=item.sender, error=type(error).__name__, reason=str(error), evidence=evidence)
        self._waiting.append(ReceivedMessage(self._name, fault, memoryview(b""), None))
