"""Sealing for one holder: HPKE with ML-KEM-768 and X25519 together, HKDF-SHA-256 and AES-256-GCM.

Who opens it must have broken both key exchanges, so what is recorded today stays closed to a later quantum computer.

Source: RFC 9180; the key exchange of draft-ietf-hpke-pq (ML-KEM-768 of FIPS 203, X25519 of RFC 7748), as cryptography
has it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from phalanx.errors import SignatureError

SEAL_PUBLIC_BYTES = 1184 + 32
_LATTICE_BYTES, _SEED_BYTES = 1184, 64
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


@dataclass(frozen=True, repr=False, eq=False)
class HybridSealKey:
    """The private key of one holder, of two halves."""

    lattice: MLKEM768PrivateKey
    curve: X25519PrivateKey

    @classmethod
    def generate(cls) -> Self:
        """Make a fresh key."""
        return cls(MLKEM768PrivateKey.generate(), X25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Build the key of `secret_bytes`."""
        lattice = MLKEM768PrivateKey.from_seed_bytes(raw[:_SEED_BYTES])
        return cls(lattice, X25519PrivateKey.from_private_bytes(raw[_SEED_BYTES:]))

    @property
    def secret_bytes(self) -> bytes:
        """The key itself, 96 bytes."""
        return self.lattice.private_bytes_raw() + self.curve.private_bytes_raw()

    @cached_property
    def public_bytes(self) -> bytes:
        """Its public half, 1216 bytes."""
        return self.lattice.public_key().public_bytes_raw() + self.curve.public_key().public_bytes_raw()

    def open_sealed(self, sealed: bytes, info: bytes) -> bytes:
        """Open bytes that were sealed for this key and this `info`."""
        try:
            return _SUITE.decrypt(sealed, MLKEM768X25519PrivateKey(self.lattice, self.curve), info=info)
        except (InvalidTag, ValueError) as exc:
            raise SignatureError("sealed data does not open for this key and purpose") from exc


def seal_for(public: bytes, data: bytes, info: bytes) -> bytes:
    """Return bytes that the holder of one key alone can open, for one purpose.

    Args:
        info: The purpose; callers separate purposes with `in_domain`.
    """
    lattice = MLKEM768PublicKey.from_public_bytes(public[:_LATTICE_BYTES])
    curve = X25519PublicKey.from_public_bytes(public[_LATTICE_BYTES:])
    return _SUITE.encrypt(data, MLKEM768X25519PublicKey(lattice, curve), info=info)
