"""A channel: one sender and one receiver that came out of one handshake."""

from collections.abc import Callable

from phalanx.closing import Closeable
from phalanx.security.seal.context import Context
from phalanx.security.seal.receiver import Receiver
from phalanx.security.seal.sender import Sender


class Channel(Closeable):
    """One end of a channel in one pair of epochs.

    Attributes:
        context: What it is about.
        sender: Seals what this side sends.
        receiver: Opens what the other side sends.
    """

    def __init__(self, context: Context, sender: Sender, receiver: Receiver) -> None:
        self.context, self.sender, self.receiver = context, sender, receiver

    @property
    def cipher_seconds(self) -> float:
        """In the ciphers of both directions so far, by the clock of `measure`; 0 without one."""
        return self.sender.cipher_seconds + self.receiver.cipher_seconds

    def measure(self, clock: Callable[[], float]) -> None:
        """Read a clock, such as `time.thread_time`, before and after each call of a cipher from now on."""
        self.sender.measure(clock)
        self.receiver.measure(clock)

    def close(self) -> None:
        """Forget the keys of both directions; closing twice is harmless."""
        self.sender.close()
        self.receiver.close()

    def __repr__(self) -> str:
        return f"Channel(sends in epoch {self.sender.epoch}, receives in epoch {self.receiver.epoch})"
