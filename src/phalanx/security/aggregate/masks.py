"""Masks: key streams of AES-256 in counter mode, added to a vector over Z_2^32.

A key serves one stream, so the counter begins at zero. Each is derived, by HKDF-SHA-256, from a secret of this very
round and bound to the round's terms (run, round, cohort, parameters, model) and to the parties.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.errors import AggregationError
from phalanx.security.aggregate.encoding import CHUNK, RingEncoding, Values, Words, chunk_slices
from phalanx.security.aggregate.messages import SumRefusal
from phalanx.security.crypto import in_domain

KEY_BYTES = 32
_WORD_BYTES = 4
_ZEROS = bytes(_WORD_BYTES * CHUNK)


class Mask(NamedTuple):
    """A mask that is added or subtracted.

    Attributes:
        key: 32 bytes, used for this stream alone.
    """

    key: bytes
    is_added: bool

    @property
    def cancelling_mask(self) -> "Mask":
        """The mask that cancels this one."""
        return Mask(self.key, not self.is_added)


class KeyStream:
    """The words of one key's stream, in order, in a buffer that the next call overwrites."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(AES256(key), CTR(bytes(16))).encryptor()
        self._buffer = bytearray(_WORD_BYTES * CHUNK)

    def next_words(self, count: int) -> Words:
        """Return the next words, at most `CHUNK` of them."""
        size = _WORD_BYTES * count
        self._encryptor.update_into(memoryview(_ZEROS)[:size], memoryview(self._buffer)[:size])
        return np.frombuffer(self._buffer, "<u4", count)


def pair_key(terms: str, own: tuple[str, X25519PrivateKey], other: tuple[str, str]) -> Mask:
    """Return the mask that two clients share, as the first of them by name adds and the other subtracts it."""
    public = own[1].public_key().public_bytes_raw().hex()
    ends = sorted([(own[0], public), other])
    secret = agree_secret(own[1], other)
    return Mask(derive_round_key(secret, "aggregate-mask/1", [terms, *ends]), own[0] < other[0])


def self_mask(terms: str, name: str, seed: bytes) -> Mask:
    """Return the mask of one client that the sum's server takes off once it is settled which clients are in the sum."""
    return Mask(derive_round_key(seed, "aggregate-self-mask/1", [terms, name]), True)


def agree_secret(private: X25519PrivateKey, other: tuple[str, str]) -> bytes:
    """Return the secret of a private and another client's public key.

    Raises:
        AggregationError: The public key is of low order, so the secret would be none.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other[1])))
    except ValueError as exc:
        raise AggregationError(
            SumRefusal.MALFORMED, f"{other[0]}: its X25519 key is of low order", culprit=other[0]
        ) from exc


def derive_round_key(secret: bytes, domain: str, about: Sequence[object]) -> bytes:
    """Return 32 bytes made of a secret for one purpose."""
    info = in_domain(domain, canonical_json(about))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def add_masks(total: Words, masks: Sequence[Mask]) -> None:
    """Add masks to a vector in place, or subtract those with `is_added` False."""
    streams = [(KeyStream(mask.key), mask.is_added) for mask in masks]
    for chunk in chunk_slices(len(total)):
        part = total[chunk]
        for stream, is_added in streams:
            (np.add if is_added else np.subtract)(part, stream.next_words(len(part)), out=part)


def masked_values(
    values: Values,
    encoding: RingEncoding,
    scale_and_weight: tuple[float, int],
    rounding_key: bytes,
    masks: Sequence[Mask],
    noise: NDArray[np.int64] | None = None,
) -> Words:
    """Return a client's values, encoded and masked, with its weight as last element.

    Args:
        values: ``[length]``.
        scale_and_weight: Scale from `RingEncoding.scale_for`, and the client's weight.
        rounding_key: 32 random bytes, used here alone.
        noise: Integers of the ring that are added to the rounded values; None for none.
    """
    scale, weight = scale_and_weight
    streams = [(KeyStream(mask.key), mask.is_added) for mask in masks]
    rounding, out = KeyStream(rounding_key), np.empty(len(values) + 1, np.uint32)
    out[-1] = weight
    for chunk in chunk_slices(len(out)):
        part, chunk_values = out[chunk], values[chunk]
        encoding.round_into(
            chunk_values, scale, weight, rounding.next_words(len(chunk_values)), part[: len(chunk_values)]
        )
        if noise is not None:
            part[: len(chunk_values)] += noise[chunk].astype(np.uint32)
        for stream, is_added in streams:
            (np.add if is_added else np.subtract)(part, stream.next_words(len(part)), out=part)
    return out
