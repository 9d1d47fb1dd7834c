"""A message as it arrived: its sender, and the signed frame that carried it."""

from dataclasses import dataclass

from phalanx.pipeline.protocol.message import Message
from phalanx.transport import SignedHeader


@dataclass(frozen=True)
class ReceivedMessage:
    """A message and the frame that carried it; `header` is None for what the owner says to itself."""

    sender: str
    message: Message
    payload: memoryview
    header: SignedHeader | None
