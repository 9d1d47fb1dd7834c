"""The relay around a failed link: its frames go by way of the owner, under their sender's own headers."""

import contextlib
from collections.abc import Sequence

from phalanx.errors import FrameError, PeerRefusedError, PhalanxError, TransportError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import CarriedFrames
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import Carry, parse_message
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.security.crypto import Peer, digest_hex
from phalanx.transport import CheckedFrame, Endpoint, SignedHeader


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

        Raises:
            PeerRefusedError: The receiver is unknown or was evicted.
        """
        self.send_undelivered(receiver)
        header = self._endpoint.put_aside(receiver, message.kind, message.model_dump(mode="json"), payload)
        self._send_to_owner(receiver, header, payload)
        return header

    def send_undelivered(self, receiver: str) -> None:
        """Hand a failed link's undelivered messages to the owner."""
        for header, payload in self._endpoint.take_undelivered(receiver):
            self._send_to_owner(receiver, header, (payload,))

    def forward_frame(self, frame: CheckedFrame, carry: Carry) -> None:
        """As the owner: pass a frame on to its receiver.

        Raises:
            FrameError: It is not its bringer's own, of another session, altered or malformed.
            SignatureError: Its bringer did not sign it.
        """
        header = self._statement_reader.open_frame_header(carry.header, (frame.sender, None))
        receiver = header.fields.receiver
        if header.fields.payload_digest != digest_hex(frame.payload):
            raise FrameError(f"{frame.sender!r} asks to relay an altered frame")
        # the receiver complains of what cannot be read
        with contextlib.suppress(FrameError):
            self.carried_frames.note_frame(parse_message(header.fields.kind, header.fields.body), header)
        # a receiver that is gone by now, or has lost its link to the owner too, is being replaced
        with contextlib.suppress(TransportError):
            self._endpoint.send_frame(receiver, carry.kind, carry.model_dump(mode="json"), (frame.payload,))

    def unwrap_frame(self, frame: CheckedFrame, carry: Carry) -> tuple[CheckedFrame, Message]:
        """As the receiver: take a frame out of the owner's hands as if it had come over its own link.

        Raises:
            FrameError: It does not come from the owner, is for another party, of another session, or malformed.
            SignatureError: Its header is not its sender's.
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
