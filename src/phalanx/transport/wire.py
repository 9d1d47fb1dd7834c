"""The interface between an endpoint and the network that carries its bytes."""

from collections.abc import Callable
from typing import Protocol

Handle = Callable[[bytes | memoryview, str], bytes]


class Wire(Protocol):
    """A wire carries whole frames to named parties and brings back their answers.

    It knows the party at the other end, but not the meaning or truth of the bytes.
    """

    def serve_frames(self, handle: Handle, run: str) -> None:
        """Start to pass arriving frames, each with the proven name of its sender, to `handle`."""

    def add_route(self, name: str, address: str) -> None:
        """Tell where a party is reached."""

    def deliver_frame(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """Return the receiver's answer to one frame.

        Raises:
            PeerLostError: No answer came; it is not known whether the frame arrived. May be tried again.
            PeerRefusedError: The other end is not the party it should be, or does not let us in.
        """

    def close(self) -> None:
        """Stop; deliveries under way end with an error. Closing twice is harmless."""
