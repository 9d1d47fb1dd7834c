"""The sealed split's cryptography: keys, frames, epochs, transcript, sealed states, release. Loads no torch.

handshake  ->  Channel  ->  Sender.seal_into, Receiver.open_into        one frame per tensor
EpochStore on a MonotonicCounter                                        no (key, nonce) pair twice
Transcript                                                              what both ends saw, signed
BlobSealer on a MonotonicCounter                                        states at rest, the newest only
ReleaseGate                                                             when adapters may leave
"""

from phalanx.security.crypto import MonotonicCounter, NotRollbackProofCounter
from phalanx.security.seal.blob import BlobPlace, BlobSealer
from phalanx.security.seal.channel import Channel
from phalanx.security.seal.context import (
    DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    Context,
    Direction,
    Purpose,
    Terms,
)
from phalanx.security.seal.epochs import EpochSource, EpochStore
from phalanx.security.seal.handshake import Offer, answer
from phalanx.security.seal.receiver import Announced, Receiver
from phalanx.security.seal.refusal import Refusal
from phalanx.security.seal.release import Release, ReleaseGate, ReleasePolicy, Update, Withheld
from phalanx.security.seal.sender import Sender
from phalanx.security.seal.tensor import ITEM_BYTES, TensorKind
from phalanx.security.seal.transcript import ChainHead, Statement, Transcript, compare_statements, read_statement

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "ITEM_BYTES",
    "MAX_CHUNK_BYTES",
    "Announced",
    "BlobPlace",
    "BlobSealer",
    "ChainHead",
    "Channel",
    "Context",
    "Direction",
    "EpochSource",
    "EpochStore",
    "MonotonicCounter",
    "NotRollbackProofCounter",
    "Offer",
    "Purpose",
    "Receiver",
    "Refusal",
    "Release",
    "ReleaseGate",
    "ReleasePolicy",
    "Sender",
    "Statement",
    "TensorKind",
    "Terms",
    "Transcript",
    "Update",
    "Withheld",
    "answer",
    "compare_statements",
    "read_statement",
]
