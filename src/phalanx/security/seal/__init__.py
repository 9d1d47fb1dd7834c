"""The sealed split's cryptography: keys, frames, epochs, transcript, sealed states, release. Loads no torch.

handshake  ->  Channel  ->  Sender.seal_into, Receiver.open_into        one frame per tensor
EpochStore on a MonotonicCounter                                        no (key, nonce) pair twice
Transcript                                                              what both ends saw, signed
BlobSealer on a MonotonicCounter                                        states at rest, the newest only
ReleaseGate                                                             when adapters may leave
"""

from phalanx.security.crypto import (
    MonotonicCounter as MonotonicCounter,
    NotRollbackProofCounter as NotRollbackProofCounter,
)
from phalanx.security.seal.blob import BlobPlace as BlobPlace, BlobSealer as BlobSealer
from phalanx.security.seal.context import (
    DEFAULT_CHUNK_BYTES as DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES as MAX_CHUNK_BYTES,
    Purpose as Purpose,
    Terms as Terms,
)
from phalanx.security.seal.epochs import EpochSource as EpochSource, EpochStore as EpochStore
from phalanx.security.seal.handshake import HandshakeOffer as HandshakeOffer, answer_hello as answer_hello
from phalanx.security.seal.release import (
    PermittedRelease as PermittedRelease,
    ReleaseGate as ReleaseGate,
    ReleasePolicy as ReleasePolicy,
    ReleaseRefusal as ReleaseRefusal,
    ReleaseRequest as ReleaseRequest,
)
from phalanx.security.seal.sender import Channel as Channel, Receiver as Receiver, Sender as Sender
from phalanx.security.seal.tensor import TensorKind as TensorKind
from phalanx.security.seal.transcript import (
    Transcript as Transcript,
    compare_statements as compare_statements,
    read_statement as read_statement,
)
