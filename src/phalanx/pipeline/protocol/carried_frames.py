"""The frames that the owner has carried between two workers, and so knows."""

from typing import TypeVar

from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import Activation, Bulk, Fetch, FetchReply, MessageKey, target_of
from phalanx.pipeline.protocol.tensor_stream import PART_BYTES
from phalanx.transport import SignedHeader

_Kind = TypeVar("_Kind", bound=Message)
PartyLink = tuple[str, str]
"""Sender and receiver."""

_Frame = tuple[Message, SignedHeader]


class CarriedFrames:
    """The tensors, transfers, requests and answers that went by way of the owner in this attempt and the one before.

    Their number is bounded by the allowance of a party in one attempt.
    """

    def __init__(self) -> None:
        self._present: dict[PartyLink, list[_Frame]] = {}
        self._past: dict[PartyLink, list[_Frame]] = {}

    def begin_attempt(self) -> None:
        """Begin another attempt; frames from before the last one are forgotten."""
        self._past, self._present = self._present, {}

    def note_frame(self, message: Message, header: SignedHeader) -> None:
        """Note a carried frame under its sender's header, which was checked."""
        if isinstance(message, Activation | Bulk | Fetch | FetchReply):
            self._present.setdefault((header.fields.sender, header.fields.receiver), []).append((message, header))

    def has_tensor(self, link: PartyLink, epoch: int, step: int, key: MessageKey) -> bool:
        """Whether a tensor between stages was carried."""
        place = (epoch, step, key, target_of(key))
        carried = (activation for activation, _ in self._frames_on(link, Activation))
        return any((each.epoch, each.step, each.key, each.target) == place for each in carried)

    def has_transfer(self, link: PartyLink, about: Bulk) -> bool:
        """Whether all parts of a transfer were carried, in order; `about.total` is its size, its offset is not read."""
        position = 0
        for part, header in self._frames_on(link, Bulk):
            if part.offset == 0:
                position = 0
            due = min(PART_BYTES, about.total - position)
            fits = header.fields.payload_size == due and part == about.model_copy(update={"offset": position})
            position += due if fits and position < about.total else 0
            if position == about.total:
                return True
        return False

    def has_request(self, link: PartyLink, request: Fetch) -> bool:
        """Whether a party asked for a tensor."""
        return any(fetch == request for fetch, _ in self._frames_on(link, Fetch))

    def find_answers(self, link: PartyLink, request: Fetch) -> list[tuple[FetchReply, str]]:
        """The answers to such a request, with the digests of their payloads."""
        place = (request.epoch, request.claim, request.tensor_place)
        return [
            (reply, header.fields.payload_digest)
            for reply, header in self._frames_on(link, FetchReply)
            if (reply.epoch, reply.claim, reply.tensor_place) == place
        ]

    def _frames_on(self, link: PartyLink, kind: type[_Kind]) -> list[tuple[_Kind, SignedHeader]]:
        frames = (*self._past.get(link, ()), *self._present.get(link, ()))
        return [(message, header) for message, header in frames if isinstance(message, kind)]
