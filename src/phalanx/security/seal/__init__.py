"""The sealed split's cryptography: keys, frames, epochs, transcript, sealed states, release. Loads no torch.

handshake  ->  Channel  ->  Sender.seal_into, Receiver.open_into        one frame per tensor
EpochStore on a MonotonicCounter                                        no (key, nonce) pair twice
Transcript                                                              what both ends saw, signed
BlobSealer on a MonotonicCounter                                        states at rest, the newest only
ReleaseGate                                                             when adapters may leave
"""

from phalanx.security.crypto import MonotonicCounter, NotRollbackProofCounter
from phalanx.security.seal.blob import BlobPlace, BlobSealer
from phalanx.security.seal.context import (
    DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    Purpose,
    Terms,
)
from phalanx.security.seal.epochs import EpochSource, EpochStore
from phalanx.security.seal.handshake import Offer, answer
from phalanx.security.seal.release import PermittedRelease, ReleaseGate, ReleasePolicy, ReleaseRefusal, ReleaseRequest
from phalanx.security.seal.sender import Channel, Receiver, Sender
from phalanx.security.seal.tensor import TensorKind
from phalanx.security.seal.transcript import (
    Transcript,
    compare_statements,
    read_statement,
)

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "MAX_CHUNK_BYTES",
    "BlobPlace",
    "BlobSealer",
    "Channel",
    "EpochSource",
    "EpochStore",
    "MonotonicCounter",
    "NotRollbackProofCounter",
    "Offer",
    "PermittedRelease",
    "Purpose",
    "Receiver",
    "ReleaseGate",
    "ReleasePolicy",
    "ReleaseRefusal",
    "ReleaseRequest",
    "Sender",
    "TensorKind",
    "Terms",
    "Transcript",
    "answer",
    "compare_statements",
    "read_statement",
]
