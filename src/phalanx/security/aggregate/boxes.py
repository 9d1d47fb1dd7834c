"""Sealed boxes with shares, which a client sends to a neighbour through a server that must not read them."""

from collections.abc import Callable
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from phalanx.errors import AggregationError
from phalanx.security.aggregate.masks import agree_secret, derive_round_key
from phalanx.security.aggregate.messages import ShareBox, SumRefusal, share_digest
from phalanx.security.aggregate.shamir import SHARE_BYTES, split_secret
from phalanx.security.aggregate.terms import SumTerms

_NONCE = bytes(12)
"""A key seals one box."""


class SharePair(NamedTuple):
    """The shares of a client's private mask key and of its seed, of one holder, in hex."""

    key: str
    seed: str


def deal_shares(
    secrets: tuple[bytes, bytes], holders: dict[str, int], threshold: int, fresh: Callable[[int], bytes]
) -> dict[str, SharePair]:
    """Split a private mask key and a seed among neighbours.

    Args:
        secrets: Both, 32 bytes each.
        fresh: ``fresh(n)`` returns n random bytes.
    """
    key, seed = (split_secret(secret, list(holders.values()), threshold, fresh) for secret in secrets)
    return {name: SharePair(key[number].hex(), seed[number].hex()) for name, number in holders.items()}


def seal_box(
    terms: SumTerms, adverts: str, ends: tuple[str, str], keys: tuple[X25519PrivateKey, str], shares: SharePair
) -> ShareBox:
    """Seal a neighbour's shares.

    Args:
        ends: Names of dealer and holder.
        keys: The dealer's private box key, the holder's public one in hex.
    """
    dealer, holder = ends
    cipher = _open_cipher(
        terms, (dealer, keys[0].public_key().public_bytes_raw().hex()), (holder, keys[1]), keys[0], holder
    )
    return ShareBox(
        terms=terms.terms_digest,
        sender=dealer,
        adverts=adverts,
        holder=holder,
        sealed=cipher.encrypt(_NONCE, bytes.fromhex(shares.key + shares.seed), adverts.encode()).hex(),
        key_share_digest=share_digest("key", terms, dealer, holder, shares.key),
        seed_share_digest=share_digest("seed", terms, dealer, holder, shares.seed),
    )


def open_box(terms: SumTerms, box: ShareBox, private: X25519PrivateKey, dealer_key: str) -> SharePair:
    """Open a box for its holder.

    Raises:
        AggregationError: It does not open, or holds other shares than its digests say; the dealer signed both.
    """
    dealer = (box.sender, dealer_key)
    holder = (box.holder, private.public_key().public_bytes_raw().hex())
    try:
        plain = _open_cipher(terms, dealer, holder, private, box.sender).decrypt(
            _NONCE, bytes.fromhex(box.sealed), box.adverts.encode()
        )
    except InvalidTag as exc:
        raise AggregationError(
            SumRefusal.BAD_SHARE, f"{box.sender}: its box for {box.holder} does not open", culprit=box.sender
        ) from exc
    shares = SharePair(plain[:SHARE_BYTES].hex(), plain[SHARE_BYTES:].hex())
    if not is_share_of(terms, box, "key", shares.key) or not is_share_of(terms, box, "seed", shares.seed):
        raise AggregationError(
            SumRefusal.BAD_SHARE, f"{box.sender}: its box for {box.holder} holds other shares", culprit=box.sender
        )
    return shares


def is_share_of(terms: SumTerms, box: ShareBox, kind: str, share: str) -> bool:
    """Tell whether a share is the share inside a box; `kind` is ``key`` or ``seed``."""
    meant = box.key_share_digest if kind == "key" else box.seed_share_digest
    return share_digest(kind, terms, box.sender, box.holder, share) == meant


def _open_cipher(
    terms: SumTerms, dealer: tuple[str, str], holder: tuple[str, str], private: X25519PrivateKey, other: str
) -> AESGCM:
    public = holder[1] if other == holder[0] else dealer[1]
    secret = agree_secret(private, (other, public))
    return AESGCM(derive_round_key(secret, "aggregate-box/1", [terms.terms_digest, dealer, holder]))
