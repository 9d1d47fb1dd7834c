"""Sealing: messages from one site to one key holder, for one place, through parties that neither read nor alter them.

X25519 with a fresh key, HKDF-SHA256 and AES-256-GCM; the place and both keys are in the derivation. No party
but the two ends can make other bytes of it that open, for this place or another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from phalanx.config import canonical_json
from phalanx.errors import AggregationError
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import in_domain

_KEY_BYTES = 32
_NONCE = bytes(12)
"""A key seals once."""


@dataclass(frozen=True)
class SealedPlace:
    """The one place that sealed bytes are for.

    Attributes:
        purpose: Meaning of the sealed bytes, and kind of the receiving party.
        terms: Digest of the terms of the run, 32 bytes.
        model: Digest of the weights that updates are relative to.
        site: Name of the site that the update is of.
        number: Number of the sum; 0 where a round has one alone.
    """

    purpose: str
    terms: bytes
    round: int
    model: str
    site: str
    number: int = 0


def seal_bytes(place: SealedPlace, public: bytes, data: bytes) -> bytes:
    """Return bytes that the holder of one key alone can open, for one place.

    Raises:
        AggregationError: The key is none.
    """
    ephemeral_key = X25519PrivateKey.generate()
    ephemeral = ephemeral_key.public_key().public_bytes_raw()
    return ephemeral + _open_cipher(ephemeral_key, public, (ephemeral, public), place).encrypt(_NONCE, data, None)


def unseal_bytes(place: SealedPlace, private: X25519PrivateKey, sealed: bytes) -> bytes:
    """Open sealed bytes."""
    ephemeral, rest = sealed[:_KEY_BYTES], sealed[_KEY_BYTES:]
    ends = (ephemeral, private.public_key().public_bytes_raw())
    try:
        return _open_cipher(private, ephemeral, ends, place).decrypt(_NONCE, rest, None)
    except InvalidTag as exc:
        raise AggregationError(
            SumRefusal.MALFORMED, f"{place.site}: its sealed data does not open for this place and key"
        ) from exc


def _open_cipher(private: X25519PrivateKey, other: bytes, ends: tuple[bytes, bytes], place: SealedPlace) -> AESGCM:
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as exc:
        raise AggregationError(SumRefusal.MALFORMED, f"{place.site}: a key is not an X25519 key") from exc
    facts: Mapping[str, Any] = {
        "terms": place.terms.hex(),
        "round": place.round,
        "model": place.model,
        "site": place.site,
        "number": place.number,
        "ends": [party.hex() for party in ends],
    }
    info = in_domain(place.purpose, canonical_json(dict(facts)))
    return AESGCM(HKDF(SHA256(), 32, None, info).derive(secret))
