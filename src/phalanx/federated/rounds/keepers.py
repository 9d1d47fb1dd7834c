"""Homomorphic sums at sites: each encrypts shares of its update for every keeper, and keepers open sums alone.

A keeper is a site with a key of its own. It is given all sites' shares under that key, adds them up and opens the sum,
so an owner cannot have it open anything else; and what it could open of one site is uniform without the other keepers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AggregationError, SignatureError
from phalanx.federated.carriers import messages as m
from phalanx.federated.rounds.released import ReleasedSums
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.aggregate import SumRefusal, Values
from phalanx.security.crypto import Identity, digest_hex, in_domain
from phalanx.security.homomorphic import (
    MODULUS,
    HomomorphicTerms,
    SumKey,
    add_up,
    decrypt_sum,
    encrypt_integers,
    new_key,
    rounded,
    share_out,
)

_COUNT_BYTES, _SIZE_BYTES, _MOST_HEADER = 4, 8, 4096
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\z")]


class KeyHeader(StrictModel):
    """What a keeper signs of its key.

    Attributes:
        run: Digest of the run file.
        keeper: Party name.
        key: Digest of the public key, which follows.
    """

    version: Literal[1] = 1
    run: _Digest
    keeper: _Name
    key: _Digest


class PartHeader(StrictModel):
    """What a site signs of one encrypted share of its update.

    Attributes:
        run: Digest of the run file.
        round: Number of the round.
        model: Digest of the weights that the update is relative to.
        site: Party name.
        key: Digest of the keeper's public key.
        part: Digest of the ciphertexts, which follow.
    """

    version: Literal[1] = 1
    run: _Digest
    round: Annotated[int, Field(ge=1, lt=2**53)]
    model: _Digest
    site: _Name
    key: _Digest
    part: _Digest


class _Signed(StrictModel):
    body: KeyHeader | PartHeader
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]


Item = tuple[bytes, bytes]
"""A signed header, and the bytes that it is about."""


def packed(items: Sequence[Item]) -> bytes:
    """Return items as one payload."""
    parts = [len(items).to_bytes(_COUNT_BYTES, "big")]
    for header, data in items:
        parts += [len(header).to_bytes(_COUNT_BYTES, "big"), len(data).to_bytes(_SIZE_BYTES, "big"), header, data]
    return b"".join(parts)


def unpacked(data: bytes, count: int) -> list[Item]:
    """Return the items of a payload, of which every size is checked before it is used.

    Args:
        data: Of `packed`.
        count: The most that there may be.

    Raises:
        AggregationError: It is malformed.
    """
    found: list[Item] = []
    number, at = int.from_bytes(data[:_COUNT_BYTES], "big"), _COUNT_BYTES
    if len(data) < _COUNT_BYTES or number > count:
        raise AggregationError(SumRefusal.MALFORMED, f"parts: {len(data)} bytes, {count} items at most are expected")
    for _ in range(number):
        start = at + _COUNT_BYTES + _SIZE_BYTES
        header = int.from_bytes(data[at : at + _COUNT_BYTES], "big")
        size = int.from_bytes(data[at + _COUNT_BYTES : start], "big")
        at = start + header + size
        if header > _MOST_HEADER or at > len(data):
            raise AggregationError(SumRefusal.MALFORMED, "parts: an item is longer than what came")
        found.append((data[start : start + header], data[start + header : at]))
    if at != len(data):
        raise AggregationError(SumRefusal.MALFORMED, "parts: more bytes came than items have")
    return found


def sign_header(header: KeyHeader | PartHeader, identity: Identity) -> bytes:
    """Return the bytes of a signed header."""
    return canonical_json({"body": header.model_dump(mode="json"), "signature": identity.sign(_to_sign(header)).hex()})


def read_key(terms: RunTerms, keeper: str, item: Item) -> bytes:
    """Return the public key of a keeper.

    Raises:
        AggregationError: It is not signed by that keeper for this run.
    """
    body = _checked(terms, keeper, item[0])
    if not isinstance(body, KeyHeader) or body.keeper != keeper or body.key != digest_hex(item[1]):
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{keeper}: this is not its key")
    return item[1]


def read_part(terms: RunTerms, place: tuple[int, str], key: str, site: str, item: Item) -> bytes:
    """Return the ciphertexts of one site.

    Args:
        terms: Of the run.
        place: Round, and digest of the weights.
        key: Digest of the keeper's public key.
        site: Name of the site that they are of.
        item: As it came.

    Raises:
        AggregationError: It is not signed by that site for this place and key, or other bytes came.
    """
    body = _checked(terms, site, item[0])
    if not isinstance(body, PartHeader) or body.site != site:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{site}: this is not its part")
    if (body.round, body.model, body.key) != (*place, key):
        raise AggregationError(SumRefusal.FOREIGN_ROUND, f"{site}: its part is of another round, model or key")
    if body.part != digest_hex(item[1]):
        raise AggregationError(SumRefusal.MALFORMED, f"{site}: sent other bytes than it signed for")
    return item[1]


def signer_of(header: bytes) -> str:
    """Return the name of the site that a part says it is of; a claim.

    Raises:
        AggregationError: It is malformed.
    """
    body = _parsed(header).body
    return body.site if isinstance(body, PartHeader) else body.keeper


def sum_terms(terms: RunTerms, number: int, key: str, length: int) -> HomomorphicTerms:
    """Return the terms of a round's sum under a keeper's key."""
    config = terms.config
    sites = tuple(sorted(config.sites))
    return HomomorphicTerms(terms.run, number, key, sites, config.min_cohort, length, config.max_norm)


class KeptSumSite:
    """One site's part in homomorphic sums; a keeper's too, where it is one.

    Args:
        identity: Signs parts, and the key.
        terms: Of the run.
        length: Values of an update.
        directory: Has the keeper's book of sums that it has opened.

    Guarantees:
        A keeper opens sums of `min_cohort` sites or more, each of which has signed its part for this round and model;
        of the updates from one set of weights it opens a sum of one set of sites alone. Its key lives as long as the
        process, and no other party ever has it.
    """

    def __init__(self, identity: Identity, terms: RunTerms, length: int, directory: Path) -> None:
        self._identity, self._terms, self._length = identity, terms, length
        self._opened = ReleasedSums(directory)
        self._key: SumKey | None = None

    def phase(self, order: m.SumOrder, payload: bytes) -> bytes:
        """Take a phase as a keeper: give the key, or open a sum.

        Raises:
            AggregationError: The site is no keeper, or what came is not what it should be.
        """
        if self._identity.name not in self._terms.config.keepers or order.phase not in ("key", "open"):
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{order.phase}: not of this site in a homomorphic sum")
        if self._key is None:
            self._key = new_key()
        return self._advert(self._key) if order.phase == "key" else self._open(self._key, order, payload)

    def _advert(self, key: SumKey) -> bytes:
        header = KeyHeader(run=self._terms.digest, keeper=self._identity.name, key=key.digest)
        return packed([(sign_header(header, self._identity), key.public)])

    def encrypted(self, order: m.SumOrder, values: Values, payload: bytes) -> bytes:
        """Return this site's own update of the order's round, in shares for the keepers.

        Raises:
            AggregationError: The keys that came are not those of all keepers.
        """
        keepers = self._terms.config.keepers
        items = unpacked(payload, len(keepers))
        if len(items) != len(keepers):
            raise AggregationError(SumRefusal.FOREIGN_PARTY, f"keys: {len(items)} came of {len(keepers)} keepers")
        keys = [read_key(self._terms, keeper, item) for keeper, item in zip(keepers, items, strict=True)]
        terms = [sum_terms(self._terms, order.round, digest_hex(key), self._length) for key in keys]
        shares = share_out(rounded(terms[0], values), len(keepers))
        parts: list[Item] = []
        for key, said, share in zip(keys, terms, shares, strict=True):
            part = encrypt_integers(key, said, self._identity.name, share)
            header = PartHeader(
                run=self._terms.digest,
                round=order.round,
                model=order.model,
                site=self._identity.name,
                key=said.key,
                part=digest_hex(part),
            )
            parts.append((sign_header(header, self._identity), part))
        return packed(parts)

    def _open(self, key: SumKey, order: m.SumOrder, payload: bytes) -> bytes:
        terms, place = self._terms, (order.round, order.model)
        parts: dict[str, bytes] = {}
        for item in unpacked(payload, len(terms.config.sites)):
            site = signer_of(item[0])
            if site in parts:
                raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{site}: is in the sum twice")
            parts[site] = read_part(terms, place, key.digest, site, item)
        said = sum_terms(terms, order.round, key.digest, self._length)
        opened = decrypt_sum(key, said, add_up(key.public, said, list(parts.values())))
        # before anything leaves: of what does not open nothing is held against a later sum
        self._opened.enter(order.model, order.round, tuple(parts))
        return np.ascontiguousarray(opened.total % MODULUS, "<u4").tobytes()


def _checked(terms: RunTerms, name: str, header: bytes) -> KeyHeader | PartHeader:
    signed, peer = _parsed(header), terms.roster.get(name)
    if peer is None:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{name[:80]}: is no site of this run")
    try:
        peer.verify(bytes.fromhex(signed.signature), _to_sign(signed.body))
    except SignatureError as exc:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{name}: did not sign this") from exc
    if signed.body.run != terms.digest:
        raise AggregationError(SumRefusal.FOREIGN_TERMS, f"{name}: signed for another run file")
    return signed.body


def _parsed(header: bytes) -> _Signed:
    try:
        found = _Signed.model_validate_json(header)
    except ValidationError as exc:
        raise AggregationError(SumRefusal.MALFORMED, "header: is none of a key or a part") from exc
    if canonical_json(found.model_dump(mode="json")) != header:
        raise AggregationError(SumRefusal.MALFORMED, "header: is not in canonical form")
    return found


def _to_sign(header: KeyHeader | PartHeader) -> bytes:
    domain = "homomorphic-key/1" if isinstance(header, KeyHeader) else "homomorphic-part/1"
    return in_domain(domain, canonical_json(header.model_dump(mode="json")))
