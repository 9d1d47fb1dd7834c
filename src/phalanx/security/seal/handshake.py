"""The handshake: two signed hellos make one channel.

    client -> server   hello   terms, session, epoch, salt, X25519 share and ML-KEM-768 key
    server -> client   reply   the same of its own with an ML-KEM-768 ciphertext, and the digest of the client's hello

Both derive the keys from the X25519 secret and the ML-KEM-768 one behind it, salted with a digest over both hellos as
they were signed: so epochs, salts, terms and attestation are in every key, and a side that saw other hellos has other
keys. The first frame that opens is the proof that the peer has them too. Every start of either side is a new handshake,
with a new epoch and a new salt.

Source: Krawczyk 2003 (sign-and-MAC key agreement); RFC 7748 (X25519); FIPS 203 (ML-KEM); RFC 5869 (HKDF); the two
secrets behind one another as in draft-ietf-tls-hybrid-design.
"""

import hashlib
import hmac
import secrets
import threading

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from phalanx.errors import SealError
from phalanx.security.crypto import HybridSealKey, Identity, Peer, in_domain
from phalanx.security.seal.context import SESSION_BYTES, Context, Direction, Terms
from phalanx.security.seal.direction import BoundToProcess, DirectionState
from phalanx.security.seal.epochs import EpochSource
from phalanx.security.seal.header import SealRefusal
from phalanx.security.seal.hello import CURVE_BYTES, SALT_BYTES, HandshakeHello, read_hello
from phalanx.security.seal.keys import derive_ciphers, wipe_buffer
from phalanx.security.seal.sender import Channel, Receiver, Sender


class HandshakeOffer(BoundToProcess):
    """The client's side, between its hello and the server's reply.

    Args:
        terms: Terms of the client; `terms.client` is its name.
        epochs: Raised here, before anything else.
    """

    def __init__(self, terms: Terms, identity: Identity, epochs: EpochSource) -> None:
        super().__init__()
        _check_name(identity.name, terms.client)
        self._lock = threading.Lock()
        self._private: HybridSealKey | None = HybridSealKey.generate()
        self._sent_hello = HandshakeHello(
            terms,
            secrets.token_bytes(SESSION_BYTES),
            epochs.raise_epoch(),
            secrets.token_bytes(SALT_BYTES),
            # the curve's half first, as in hellos of the server
            self._private.public_bytes[-CURVE_BYTES:] + self._private.public_bytes[:-CURVE_BYTES],
        )
        self.hello = self._sent_hello.sign_hello(identity)

    def accept_reply(self, reply: bytes, server: Peer, *, after_epoch: int = 0) -> Channel:
        """Take the server's reply; a refused one changes nothing, and the right one is accepted once.

        Args:
            server: Party that must have signed the reply. Its message key must be the key that the attestation vouches
                for.
            after_epoch: The newest epoch that this side has seen of the server; a machine that was turned back, or
                a replay, is not newer.

        Raises:
            SealError: It is malformed, for other terms, or no reply to this hello; or the offer was used.
        """
        hello = self._sent_hello
        _check_name(server.name, hello.terms.server)
        heard = read_hello(reply, hello.terms, server)
        if not hmac.compare_digest(heard.reply_to, _hello_digest(self.hello)) or heard.session != hello.session:
            raise SealError(SealRefusal.STALE_REPLY, "reply: answers another hello; it is replayed or misdirected")
        _check_newer(heard, after_epoch)
        with self._lock:
            self.check_process()
            if self._private is None:
                raise SealError(SealRefusal.CLOSED, "offer: was accepted before; its keys are not used twice")
            lattice_secret = self._private.lattice.decapsulate(heard.share[CURVE_BYTES:])
            secret = _agree_secret(self._private.curve, heard.share, lattice_secret)
            # the keys exist now, and must not come into being a second time
            self._private = None
        return _open_channel(secret, (self.hello, reply), Direction.TO_SERVER, hello, heard)


def answer_hello(
    hello: bytes, terms: Terms, identity: Identity, epochs: EpochSource, client: Peer, *, after_epoch: int = 0
) -> tuple[bytes, Channel]:
    """Take a client's hello on the server's side.

    A hello that is replayed, where `after_epoch` is not kept, leads to a channel in which nothing ever opens: keep the
    old one until a frame does.

    Args:
        terms: Terms of the server; `terms.server` is its name.
        epochs: Raised once the hello was found good.
        after_epoch: Last epoch of the client that is refused, as in `HandshakeOffer.accept_reply`.

    Raises:
        SealError: It is malformed or for other terms.
    """
    _check_name(identity.name, terms.server)
    _check_name(client.name, terms.client)
    heard = read_hello(hello, terms, client)
    if heard.reply_to:
        raise SealError(SealRefusal.MALFORMED, "hello: is a reply")
    _check_newer(heard, after_epoch)
    private = X25519PrivateKey.generate()
    lattice_secret, ciphertext = _encapsulate(heard.share[CURVE_BYTES:])
    secret = _agree_secret(private, heard.share, lattice_secret)
    own_hello = HandshakeHello(
        terms,
        heard.session,
        epochs.raise_epoch(),
        secrets.token_bytes(SALT_BYTES),
        private.public_key().public_bytes_raw() + ciphertext,
        _hello_digest(hello),
    )
    reply = own_hello.sign_hello(identity)
    return reply, _open_channel(secret, (hello, reply), Direction.TO_CLIENT, own_hello, heard)


def _open_channel(
    secret: bytearray, hellos: tuple[bytes, bytes], sends: Direction, sent: HandshakeHello, received: HandshakeHello
) -> Channel:
    context = Context(sent.terms, sent.session)
    transcript = hashlib.sha256(in_domain("seal-handshake/1", b"".join(map(_hello_digest, hellos)))).digest()
    receives = Direction.TO_CLIENT if sends is Direction.TO_SERVER else Direction.TO_SERVER
    lanes = [
        DirectionState(context, direction, epoch, derive_ciphers(secret, transcript, context, direction, epoch))
        for direction, epoch in ((sends, sent.epoch), (receives, received.epoch))
    ]
    wipe_buffer(secret)
    return Channel(context, Sender(lanes[0]), Receiver(lanes[1]))


def _encapsulate(lattice_key: bytes) -> tuple[bytes, bytes]:
    try:
        return MLKEM768PublicKey.from_public_bytes(lattice_key).encapsulate()
    except ValueError as exc:
        raise SealError(SealRefusal.MALFORMED, "hello: its ML-KEM-768 key is none") from exc


def _agree_secret(private: X25519PrivateKey, share: bytes, lattice_secret: bytes) -> bytearray:
    try:
        other = X25519PublicKey.from_public_bytes(share[:CURVE_BYTES])
        return bytearray(private.exchange(other) + lattice_secret)
    except ValueError as exc:
        raise SealError(SealRefusal.MALFORMED, "hello: its X25519 share is of low order") from exc


def _check_newer(heard: HandshakeHello, after_epoch: int) -> None:
    if heard.epoch <= after_epoch:
        raise SealError(
            SealRefusal.STALE_EPOCH,
            f"hello: of epoch {heard.epoch}, {after_epoch} is known: replayed, or the peer was turned back",
        )


def _hello_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _check_name(name: str, expected: str) -> None:
    if name != expected:
        raise SealError(SealRefusal.FOREIGN_PARTY, f"hello: {name} in the place of {expected}")
