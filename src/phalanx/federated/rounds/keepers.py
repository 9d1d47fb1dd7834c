"""Homomorphic sums at sites: each encrypts shares of its update for every keeper, and keepers open sums alone.

A keeper is a site with a key of its own. It receives all sites' shares under that key, adds them and opens the sum, so
an owner cannot have it open anything else; and the shares of one site that it could open are uniform without the other
keepers. Ciphertexts of BFV can be derived from others: a site that saw them could subtract them in its part. So they
travel sealed to the keeper, for one site, round, model and sum: no party but the keeper ever has them, and a part that
is derived from another site's sealed one does not open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AggregationError, SignatureError
from phalanx.federated.carriers import messages as m
from phalanx.federated.rounds.released import ReleasedSums
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.sealing import SealedPlace, seal_bytes, unseal_bytes
from phalanx.security.aggregate import SumRefusal, Values
from phalanx.security.crypto import HybridSealKey, Identity, digest_hex, in_domain
from phalanx.security.homomorphic import (
    MODULUS,
    HomomorphicTerms,
    SumKey,
    check_part,
    decrypt_sum,
    encrypt_integers,
    new_key,
    round_values,
    share_out,
    sum_ciphertexts,
)

_COUNT_BYTES, _SIZE_BYTES, _MAX_HEADER = 4, 8, 4096
_MAX_SITES, _MAX_NAME_BYTES = 1000, 2**17
_SEAL = "keeper-seal/2"
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\z")]


class KeyHeader(StrictModel):
    """The signed statement of a keeper about its key.

    Attributes:
        key: Digest of the public key, which follows.
        seal: Public key that parts for it are sealed for, in hex.
    """

    version: Literal[3] = 3
    run: _Digest
    keeper: _Name
    key: _Digest
    seal: Annotated[str, Field(pattern=r"^[0-9a-f]{2432}\z")]


class PartHeader(StrictModel):
    """The signed statement of a site about one encrypted and sealed share of its update.

    Attributes:
        model: Digest of the weights that the update is relative to.
        key: Digest of the keeper's public key.
        part: Digest of the sealed ciphertexts, which follow.
    """

    version: Literal[3] = 3
    run: _Digest
    round: Annotated[int, Field(ge=1, lt=2**53)]
    model: _Digest
    number: Annotated[int, Field(ge=1, lt=2**53)]
    site: _Name
    key: _Digest
    part: _Digest


class SiteNames(StrictModel):
    """The sites whose parts a keeper accepts, or the sites of the sum that it is to open; each once, in order."""

    sites: Annotated[tuple[_Name, ...], Field(max_length=_MAX_SITES)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.sites) != sorted(set(self.sites)):
            raise ValueError("sites: expected each name once, in order")
        return self

    @classmethod
    def names_from_bytes(cls, data: bytes) -> tuple[str, ...]:
        """Return the names in a payload."""
        try:
            return cls.model_validate_json(data[:_MAX_NAME_BYTES]).sites
        except ValidationError as exc:
            raise AggregationError(SumRefusal.MALFORMED, "names: expected a list of sites") from exc

    def to_bytes(self) -> bytes:
        """Return the payload."""
        return canonical_json(self.model_dump(mode="json"))


@dataclass(frozen=True)
class KeeperKey:
    """The public keys of one keeper."""

    public: bytes
    seal: bytes

    @cached_property
    def public_digest(self) -> str:
        """The digest of the key that encrypts, by which parts name the keeper's key."""
        return digest_hex(self.public)


@dataclass(frozen=True)
class SumPlace:
    """The sum that a part is for."""

    round: int
    model: str
    number: int


class _Signed(StrictModel):
    body: KeyHeader | PartHeader
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]


Item = tuple[bytes, bytes]
"""A signed header, and the bytes that it is about."""


def pack_items(items: Sequence[Item]) -> bytes:
    """Return items as one payload."""
    parts = [len(items).to_bytes(_COUNT_BYTES, "big")]
    for header, data in items:
        parts += [len(header).to_bytes(_COUNT_BYTES, "big"), len(data).to_bytes(_SIZE_BYTES, "big"), header, data]
    return b"".join(parts)


def unpack_items(data: bytes, count: int) -> list[Item]:
    """Return the items of a payload, of which every size is checked before it is used.

    Args:
        data: Payload from `packed`.
        count: The most that there may be.
    """
    items: list[Item] = []
    number, position = int.from_bytes(data[:_COUNT_BYTES], "big"), _COUNT_BYTES
    if len(data) < _COUNT_BYTES or number > count:
        raise AggregationError(SumRefusal.MALFORMED, f"parts: {len(data)} bytes, {count} items at most are expected")
    for _ in range(number):
        start = position + _COUNT_BYTES + _SIZE_BYTES
        header = int.from_bytes(data[position : position + _COUNT_BYTES], "big")
        size = int.from_bytes(data[position + _COUNT_BYTES : start], "big")
        position = start + header + size
        if header > _MAX_HEADER or position > len(data):
            raise AggregationError(SumRefusal.MALFORMED, "parts: an item exceeds the message")
        items.append((data[start : start + header], data[start + header : position]))
    if position != len(data):
        raise AggregationError(SumRefusal.MALFORMED, "parts: bytes after the last item")
    return items


def sign_header(header: KeyHeader | PartHeader, identity: Identity) -> bytes:
    """Return the bytes of a signed header."""
    return canonical_json(
        {"body": header.model_dump(mode="json"), "signature": identity.sign_data(_signed_bytes(header)).hex()}
    )


def read_key(terms: RunTerms, keeper: str, item: Item) -> KeeperKey:
    """Return the public keys of a keeper."""
    body = _check_signed(terms, keeper, item[0])
    if not isinstance(body, KeyHeader) or body.keeper != keeper or body.key != digest_hex(item[1]):
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{keeper}: not its key")
    return KeeperKey(item[1], bytes.fromhex(body.seal))


def read_part(terms: RunTerms, place: SumPlace, key: str, site: str, item: Item) -> bytes:
    """Return the sealed ciphertexts of one site."""
    body = _check_signed(terms, site, item[0])
    if not isinstance(body, PartHeader) or body.site != site:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{site}: not its part")
    if (SumPlace(body.round, body.model, body.number), body.key) != (place, key):
        raise AggregationError(
            SumRefusal.FOREIGN_ROUND, f"{site}: its part belongs to another round, model, sum or key"
        )
    if body.part != digest_hex(item[1]):
        raise AggregationError(SumRefusal.MALFORMED, f"{site}: sent bytes that differ from its signed digest")
    return item[1]


def signer_of(header: bytes) -> str:
    """Return the name of the site that a part says it is of; a claim."""
    body = _parse_signed(header).body
    return body.site if isinstance(body, PartHeader) else body.keeper


def sum_terms(terms: RunTerms, number: int, key: str, length: int) -> HomomorphicTerms:
    """Return the terms of a round's sum under a keeper's key."""
    config = terms.config
    sites = tuple(sorted(config.sites))
    return HomomorphicTerms(terms.run, number, key, sites, config.min_cohort, length, config.max_norm)


class KeeperSumSite:
    """One site's part in homomorphic sums; a keeper's too, where it is one.

    Args:
        directory: Has the keeper's log of sums that it has opened.

    Guarantees:
        A keeper opens sums of `min_cohort` sites or more, each of which has signed its part for this round, model and
        sum; of the updates of a round from one set of weights it opens a sum of one set of sites alone. With one honest
        keeper the owner and sites in league learn the sum of the others and nothing else: an honest keeper adds parts
        that were sealed for it by their sites, so no part in its sum can depend on another site's. Its keys live as
        long as the process, and no other party ever has them.
    """

    def __init__(self, identity: Identity, terms: RunTerms, length: int, directory: Path) -> None:
        self._identity, self._terms, self._length = identity, terms, length
        self._opened = ReleasedSums(directory)
        self._keys: tuple[SumKey, HybridSealKey] | None = None
        self._held: tuple[SumPlace, dict[str, bytes]] | None = None

    def handle_phase(self, order: m.SumOrder, payload: bytes) -> bytes:
        """Take a phase as a keeper: give the keys, check parts, or open a sum of accepted parts."""
        if self._identity.name not in self._terms.config.keepers:
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{order.phase}: this site is not a keeper")
        if self._keys is None:
            self._keys = new_key(), HybridSealKey.generate()
        key, private = self._keys
        place = SumPlace(order.round, order.model, order.number)
        if order.phase == "key":
            return self._key_advert(key, private)
        if order.phase == "check":
            return self._check_part_list((key, private), place, payload)
        if order.phase == "open":
            return self._open_sum(key, place, payload)
        raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{order.phase}: not a phase of a homomorphic sum")

    def _key_advert(self, key: SumKey, private: HybridSealKey) -> bytes:
        seal_key = private.public_bytes.hex()
        header = KeyHeader(run=self._terms.digest, keeper=self._identity.name, key=key.public_digest, seal=seal_key)
        return pack_items([(sign_header(header, self._identity), key.public)])

    def encrypt_update(self, order: m.SumOrder, values: Values, payload: bytes) -> bytes:
        """Return this site's own update of the order's round, in shares that are sealed for the keepers."""
        keepers, place = self._terms.config.keepers, SumPlace(order.round, order.model, order.number)
        items = unpack_items(payload, len(keepers))
        if len(items) != len(keepers):
            raise AggregationError(SumRefusal.FOREIGN_PARTY, f"keys: got {len(items)} from {len(keepers)} keepers")
        keys = [read_key(self._terms, keeper, item) for keeper, item in zip(keepers, items, strict=True)]
        terms = [sum_terms(self._terms, order.round, key.public_digest, self._length) for key in keys]
        shares = share_out(round_values(terms[0], values), len(keepers))
        parts: list[Item] = []
        for key, sum_of_key, share in zip(keys, terms, shares, strict=True):
            part = encrypt_integers(key.public, sum_of_key, self._identity.name, share)
            sealed = seal_bytes(self._sealed_place(place, self._identity.name), key.seal, part)
            header = PartHeader(
                run=self._terms.digest,
                round=order.round,
                model=order.model,
                number=order.number,
                site=self._identity.name,
                key=key.public_digest,
                part=digest_hex(sealed),
            )
            parts.append((sign_header(header, self._identity), sealed))
        return pack_items(parts)

    def _check_part_list(self, keys: tuple[SumKey, HybridSealKey], place: SumPlace, payload: bytes) -> bytes:
        """Keep the parts that are fit to be added; return the names of their sites."""
        (key, private), terms = keys, sum_terms(self._terms, place.round, keys[0].public_digest, self._length)
        fit: dict[str, bytes] = {}
        for item in unpack_items(payload, len(self._terms.config.sites)):
            site = signer_of(item[0])
            if site in fit:
                raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{site}: has two parts")
            try:
                sealed = read_part(self._terms, place, key.public_digest, site, item)
                part = unseal_bytes(self._sealed_place(place, site), private, sealed)
                check_part(key.public, terms, site, part)
            except AggregationError:
                continue
            fit[site] = part
        self._held = place, fit
        return SiteNames(sites=tuple(sorted(fit))).to_bytes()

    def _open_sum(self, key: SumKey, place: SumPlace, payload: bytes) -> bytes:
        sites = SiteNames.names_from_bytes(payload)
        parts = self._held[1] if self._held is not None and self._held[0] == place else {}
        if not parts.keys() >= set(sites):
            raise AggregationError(SumRefusal.FOREIGN_PARTY, "sum: has a site without a valid part")
        terms = sum_terms(self._terms, place.round, key.public_digest, self._length)
        opened = decrypt_sum(key, terms, sum_ciphertexts(key.public, terms, [parts[site] for site in sites]))
        # before anything leaves: of what does not open nothing is held against a later sum
        self._opened.note_release(place.model, place.round, sites)
        return np.ascontiguousarray(opened.total % MODULUS, "<u4").tobytes()

    def _sealed_place(self, place: SumPlace, site: str) -> SealedPlace:
        return SealedPlace(_SEAL, bytes.fromhex(self._terms.digest), place.round, place.model, site, place.number)


def _check_signed(terms: RunTerms, name: str, header: bytes) -> KeyHeader | PartHeader:
    signed, peer = _parse_signed(header), terms.roster.get(name)
    if peer is None:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{name[:80]}: not a site of this run")
    try:
        peer.verify_signature(bytes.fromhex(signed.signature), _signed_bytes(signed.body))
    except SignatureError as exc:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{name}: did not sign this") from exc
    if signed.body.run != terms.digest:
        raise AggregationError(SumRefusal.FOREIGN_TERMS, f"{name}: signed for another run file")
    return signed.body


def _parse_signed(header: bytes) -> _Signed:
    try:
        signed = _Signed.model_validate_json(header)
    except ValidationError as exc:
        raise AggregationError(SumRefusal.MALFORMED, "header: not the header of a key or a part") from exc
    if canonical_json(signed.model_dump(mode="json")) != header:
        raise AggregationError(SumRefusal.MALFORMED, "header: is not in canonical form")
    return signed


def _signed_bytes(header: KeyHeader | PartHeader) -> bytes:
    domain = "homomorphic-key/3" if isinstance(header, KeyHeader) else "homomorphic-part/3"
    return in_domain(domain, canonical_json(header.model_dump(mode="json")))
