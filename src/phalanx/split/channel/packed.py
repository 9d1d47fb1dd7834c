"""A frame that goes out, and how it goes; torch-free."""

from phalanx.split.channel.message import SplitMessage
from phalanx.transport import Endpoint


class PackedFrame(bytearray):
    """A frame of a link.

    Attributes:
        digest: Its `digest_hex`, which the transport that signs it need not make again; empty where it was not made.
    """

    digest: str = ""


def post(endpoint: Endpoint, receiver: str, message: SplitMessage, frame: PackedFrame) -> None:
    """Send a message with a frame.

    Raises:
        FrameError, PeerRefusedError, PeerLostError: As `Endpoint.send`.
    """
    body, payload = message.model_dump(mode="json"), memoryview(frame)
    if frame.digest:
        endpoint.send_hashed(receiver, message.kind, body, payload, frame.digest)
    else:
        endpoint.send(receiver, message.kind, body, (payload,))
