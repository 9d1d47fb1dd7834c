"""The base of every message between the parties of a verified pipeline."""

from dataclasses import dataclass

from phalanx.pipeline.protocol.bounds import Epoch
from phalanx.transport import Body, SignedHeader


class Message(Body):
    """A message between parties of a verified pipeline."""

    epoch: Epoch
    """Rises by one whenever the assignment changes; what belongs to an older epoch is dropped."""


@dataclass(frozen=True)
class ReceivedMessage:
    """A message and the frame that carried it; `header` is None for what the owner says to itself."""

    sender: str
    message: Message
    payload: memoryview
    header: SignedHeader | None
