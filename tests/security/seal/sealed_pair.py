"""A client and a server that shake hands in one process."""

from dataclasses import replace

from phalanx.security.crypto import Identity
from phalanx.security.seal import Channel, HandshakeOffer, Purpose, TensorKind, Terms, answer_hello

TERMS = Terms("run-1", b"\x11" * 32, b"\x22" * 32, "client-a", "enclave", chunk_bytes=32)
CUT = TensorKind(Purpose.ACTIVATION, "cut", "uint8", (70,))
"""Three chunks of `TERMS`, the last one shorter."""
CLIENT, SERVER = Identity.without_certificate("client-a"), Identity.without_certificate("enclave")


class CountingEpochs:
    """Epochs that cannot be turned back."""

    def __init__(self) -> None:
        self.notice_count = 0

    def raise_epoch(self) -> int:
        self.notice_count += 1
        return self.notice_count


def shake_hands(terms=TERMS, client_epochs=None, server_epochs=None) -> tuple[Channel, Channel]:
    """Return the ends of a fresh channel, the client's first."""
    offer = HandshakeOffer(terms, CLIENT, client_epochs or CountingEpochs())
    reply, server = answer_hello(offer.hello, terms, SERVER, server_epochs or CountingEpochs(), CLIENT.public)
    return offer.accept_reply(reply, SERVER.public), server


def other_terms(**changes) -> Terms:
    return replace(TERMS, **changes)


def plain(seed: int = 0, size: int = CUT.size_bytes) -> bytes:
    """Bytes that differ by seed."""
    return bytes((seed + 7 * i) % 256 for i in range(size))
