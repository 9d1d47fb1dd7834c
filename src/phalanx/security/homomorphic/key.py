"""The key of homomorphic sums: BFV of TenSEAL, whole or shared among a committee.

TenSEAL has no threshold decryption. A committee therefore shares the key that seals the secret one, and members that
put their shares together have the whole secret key, with which they can open any client's values as well as the sum.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from phalanx.errors import AggregationError, ConfigError
from phalanx.security.aggregate import SumRefusal
from phalanx.security.aggregate.shamir import combine_shares, split_secret
from phalanx.security.crypto import digest_hex

RING = 4096
"""Degree of the polynomials, and values in one ciphertext."""
MODULUS = 1073692673
"""Largest prime below 2^30 that is 1 modulo twice the degree, so that each slot is a number modulo it."""
_COEFFICIENTS = [54, 54]
"""Bits of the ciphertext's modulus: 108 in all, of the 109 that give 128 bits of security at this degree."""
_NONCE_BYTES, _MAX_BYTES = 12, 2**22


@dataclass(frozen=True)
class SumKey:
    """A key pair of homomorphic sums.

    Attributes:
        public: Public key: clients encrypt with it, and a server adds with it.
        secret: Secret key: to be kept in an enclave, or shared among a committee and forgotten.
    """

    public: bytes
    secret: bytes

    @cached_property
    def public_digest(self) -> str:
        """The digest of the public key, by which ciphertexts name it."""
        return digest_hex(self.public)


@dataclass(frozen=True)
class KeyCommittee:
    """A secret key that any `threshold` members of a committee can put together.

    Attributes:
        sealed: The secret key, sealed; every member may have it.
        shares: Shares of the sealing key, by the member's number from 1; a member gets its own share alone.
        threshold: Fewer shares tell nothing of the key.
    """

    sealed: bytes
    shares: Mapping[int, bytes]
    threshold: int


def new_key() -> SumKey:
    """Make a key pair, by TenSEAL's own generator."""
    seal = load_tenseal()
    context = seal.context(
        seal.SCHEME_TYPE.BFV, poly_modulus_degree=RING, plain_modulus=MODULUS, coeff_mod_bit_sizes=_COEFFICIENTS
    )
    leave_out = {"save_galois_keys": False, "save_relin_keys": False}
    return SumKey(
        context.serialize(save_secret_key=False, **leave_out), context.serialize(save_secret_key=True, **leave_out)
    )


def split_key(key: SumKey, members: Sequence[int], threshold: int) -> KeyCommittee:
    """Share a secret key among a committee; the caller forgets the key.

    Args:
        members: Their numbers, from 1.
        threshold: 2 to the number of members.

    Raises:
        ConfigError: One member could open everything alone.
    """
    if not 2 <= threshold <= len(members):
        raise ConfigError(f"key committee: {threshold} of {len(members)} members; expected 2 at least, and no more")
    sealing, nonce = os.urandom(32), os.urandom(_NONCE_BYTES)
    sealed = nonce + AESGCM(sealing).encrypt(nonce, key.secret, key.public_digest.encode())
    return KeyCommittee(sealed, split_secret(sealing, members, threshold, os.urandom), threshold)


def join_key(public: bytes, sealed: bytes, shares: Mapping[int, bytes]) -> SumKey:
    """Put a secret key together.

    Args:
        sealed: Sealed secret key from `KeyCommittee`.
        shares: Shares of at least the threshold's number of members.

    Raises:
        AggregationError: The shares are too few, of another key, or altered.
    """
    # of shares that give no key at all, one that opens nothing
    sealing = (combine_shares(shares) if shares else None) or bytes(32)
    try:
        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        return SumKey(public, AESGCM(sealing).decrypt(nonce, rest, digest_hex(public).encode()))
    except (InvalidTag, ValueError) as exc:
        raise AggregationError(
            SumRefusal.BAD_SHARE, f"key committee: {len(shares)} shares do not open the key; it takes the threshold"
        ) from exc


def context_of(data: bytes, *, secret: bool) -> Any:
    """Return TenSEAL's context of a public or a secret key."""
    if len(data) > _MAX_BYTES:
        raise AggregationError(SumRefusal.MALFORMED, f"key: {len(data)} bytes, at most {_MAX_BYTES} are expected")
    try:
        context = load_tenseal().context_from(data)
        has_secret = context.has_secret_key()
        probe = load_tenseal().bfv_vector(context, [MODULUS - 1])
        is_ours = probe.size() == 1 and context.has_public_key()
    except (ValueError, RuntimeError, TypeError) as exc:
        raise AggregationError(SumRefusal.MALFORMED, "key: is not one of TenSEAL's for BFV") from exc
    if not is_ours or has_secret is not secret:
        kind = "secret" if secret else "public"
        raise AggregationError(SumRefusal.MALFORMED, f"key: is no {kind} one")
    return context


def load_tenseal() -> Any:
    """Return TenSEAL's module."""
    try:
        import tenseal as seal  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError("homomorphic sums need tenseal, which is not installed; install phalanx-train[he]") from exc
    return seal
