"""Sealing: messages from one site to one key holder, for one place, through parties that neither read nor alter them.

HPKE with ML-KEM-768 and X25519; the place is in the derivation. What was sealed for one place opens for no other, and
a later quantum computer does not open what it finds recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import AggregationError, SignatureError
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import HybridSealKey, in_domain, seal_for


@dataclass(frozen=True)
class SealedPlace:
    """The one place that sealed bytes are for.

    Attributes:
        terms: Digest of the terms of the run, 32 bytes.
        number: Number of the sum; 0 where a round has one alone.
    """

    purpose: str
    terms: bytes
    round: int
    model: str
    site: str
    number: int = 0


def seal_bytes(place: SealedPlace, public: bytes, data: bytes) -> bytes:
    """Return bytes that the holder of one key alone can open, for one place."""
    try:
        return seal_for(public, data, _place_info(place))
    except ValueError as exc:
        raise AggregationError(SumRefusal.MALFORMED, f"{place.site}: a key is not one to seal for") from exc


def unseal_bytes(place: SealedPlace, private: HybridSealKey, sealed: bytes) -> bytes:
    """Open sealed bytes."""
    try:
        return private.open_sealed(sealed, _place_info(place))
    except SignatureError as exc:
        raise AggregationError(
            SumRefusal.MALFORMED, f"{place.site}: its sealed data does not open for this place and key"
        ) from exc


def _place_info(place: SealedPlace) -> bytes:
    facts: Mapping[str, Any] = {
        "terms": place.terms.hex(),
        "round": place.round,
        "model": place.model,
        "site": place.site,
        "number": place.number,
    }
    return in_domain(place.purpose, canonical_json(dict(facts)))
