"""The client of a secure sum: messages in, messages out, one method a phase, no I/O but its book of rounds.

A message that is refused changes nothing: the right one may still come. What a phase gives out it gives out once.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from phalanx.errors import AggregationError
from phalanx.security.aggregate import messages as m
from phalanx.security.aggregate.boxes import SharePair, deal_shares, open_box, seal_box
from phalanx.security.aggregate.encoding import Values, Words, norm_of
from phalanx.security.aggregate.masks import masked_values, pair_key, self_mask
from phalanx.security.aggregate.messages import SumRefusal
from phalanx.security.aggregate.rounds import EnteredRounds
from phalanx.security.aggregate.terms import SumTerms
from phalanx.security.aggregate.view import check_consents, check_included, check_view
from phalanx.security.crypto import Identity, Peer, digest_hex


class SumPhase(IntEnum):
    """The message that a client waits for."""

    TERMS = 0
    ADVERTS = 1
    DELIVERY = 2
    DEPOSITS = 3
    CONSENTS = 4
    NOTHING = 5


@dataclass(frozen=True)
class ExpectedRound:
    """A client's facts about a round from elsewhere, for which it takes no party's word.

    Attributes:
        length: Number of values per client.
        roster: All that may be in a cohort, by name: certified by the run's authority.
        minimum: Clients that a sum must have at least for this client to take part.
    """

    run: str
    run_digest: str
    model_digest: str
    length: int
    server: Peer
    roster: Mapping[str, Peer]
    minimum: int

    def check_terms(self, terms: SumTerms, name: str) -> None:
        """Raise unless the terms belong to this round and protect the client of this name."""
        for field in ("run", "run_digest", "model_digest", "length"):
            if (value := getattr(terms, field)) != (expected := getattr(self, field)):
                raise AggregationError(
                    SumRefusal.FOREIGN_TERMS, f"terms: {field} is {str(value)[:80]}, expected {str(expected)[:80]}"
                )
        for member in terms.cohort:
            entry = self.roster.get(member.name)
            if entry is None or entry.public_key.hex() != member.key:
                raise AggregationError(SumRefusal.FOREIGN_PARTY, f"terms: {member.name} has not the key of the roster")
        if name not in terms.client_names:
            raise AggregationError(SumRefusal.NOT_INCLUDED, f"terms: {name} is not in the cohort")
        if terms.minimum < self.minimum:
            raise AggregationError(
                SumRefusal.SMALL_COHORT,
                f"terms: a sum may have {terms.minimum} clients, this client wants {self.minimum} at least",
            )


@dataclass(frozen=True)
class MaskedDeposit:
    """A client's message of the third phase.

    Attributes:
        values: The masked values, 4 bytes each, little-endian.
    """

    message: bytes
    values: Words


class SumClient:
    """One client in one round.

    Args:
        fresh: Draws random bytes; another one than the system's generator is for test vectors.

    Guarantees:
        The server, with fewer than a third of the cohort, learns no more of this client's values than a sum over at
        least `minimum` clients, in which it knows the values of colluding clients alone. Each mask covers one vector:
        keys are drawn for this object, and a round is entered once, in whatever process. The sum itself is not
        protected, and a server that adds wrongly is not detected.

    Source: Bonawitz et al. 2017; Bell et al. 2020. What differs: docs/secure_aggregation.md.
    """

    def __init__(
        self,
        identity: Identity,
        expected: ExpectedRound,
        rounds: EnteredRounds,
        fresh: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._identity, self._expected, self._rounds, self._fresh = identity, expected, rounds, fresh
        self._name, self._pid = identity.name, os.getpid()
        self.phase = SumPhase.TERMS
        self._shares: dict[str, SharePair] = {}
        self._sharers: tuple[str, ...] = ()
        self._included: dict[str, str] = {}

    def join_round(self, terms: bytes) -> bytes:
        """Take the terms of a round; enter it, and return this client's keys.

        Raises:
            AggregationError: They are malformed, not of this round, or do not protect this client; or the round was
                entered before.
        """
        self._check_phase(SumPhase.TERMS)
        round_terms = m.read_terms(terms, self._expected.server)
        self._expected.check_terms(round_terms, self._name)
        self._rounds.enter_round(round_terms.run, round_terms.round)
        self._terms = round_terms
        self._peers = {member.name: Peer.from_hex(member.name, member.key) for member in round_terms.cohort}
        self._box_key, self._mask_key = (X25519PrivateKey.from_private_bytes(self._fresh(32)) for _ in range(2))
        self._seed = self._fresh(32)
        advert = m.Advert(
            terms=round_terms.terms_digest,
            sender=self._name,
            box_key=self._box_key.public_key().public_bytes_raw().hex(),
            mask_key=self._mask_key.public_key().public_bytes_raw().hex(),
            seed_digest=m.seed_digest(round_terms, self._name, self._seed),
        )
        self._own_advert = m.sign_message(advert, self._identity)
        self.phase = SumPhase.ADVERTS
        return m.encode_message(self._own_advert)

    @property
    def round_terms(self) -> SumTerms:
        """The terms of the round that it has joined."""
        return self._terms

    @property
    def included_clients(self) -> tuple[str, ...]:
        """The clients in the sum that this client consented to, by name; empty before."""
        return tuple(sorted(self._included))

    def share_secrets(self, adverts: bytes) -> bytes:
        """Take all clients' keys; return sealed shares of this client's two secrets, one box a neighbour.

        Raises:
            AggregationError: A key is not signed by its client for this round, too few came, or this client's own
                are not among them as it sent them.
        """
        self._check_phase(SumPhase.ADVERTS)
        terms, heard = self._terms, self._read_message(adverts, m.Adverts).adverts
        bodies = {(body := m.check_signed(message, terms, self._peers)).sender: body for message in heard}
        if [message.body.sender for message in heard] != sorted(bodies):
            raise AggregationError(SumRefusal.MALFORMED, "adverts: expected each sender once, in order")
        if self._own_advert not in heard:
            raise AggregationError(SumRefusal.NOT_INCLUDED, "adverts: this client's own is not there as it sent it")
        digest = m.adverts_digest(terms, heard)
        graph = terms.neighbours_by_client(digest)
        check_view(terms, graph, self._name, list(bodies))
        holders = {name: terms.client_names.index(name) + 1 for name in graph[self._name]}
        # a neighbour that sent no keys gets no box; its number stays its own
        dealt = deal_shares(
            (self._mask_key.private_bytes_raw(), self._seed), holders, terms.graph_degree.shares, self._fresh
        )
        boxes = tuple(
            m.sign_message(
                seal_box(terms, digest, (self._name, name), (self._box_key, bodies[name].box_key), shares),
                self._identity,
            )
            for name, shares in dealt.items()
            if name in bodies
        )
        self._adverts, self._adverts_digest, self._graph = bodies, digest, graph
        self.phase = SumPhase.DELIVERY
        return m.encode_message(m.Boxes(boxes=boxes))

    def mask_values(
        self, delivery: bytes, values: Values, weight: int = 1, noise: NDArray[np.int64] | None = None
    ) -> MaskedDeposit:
        """Take the neighbours' shares; return this client's values, clipped, rounded and masked.

        Args:
            delivery: Names of the clients that shared, and the boxes for this client.
            values: ``[length]``, finite.
            weight: 1 to the terms' `max_weight`.
            noise: Integers of the ring, ``[length]``, that are added before the masks: this client's share of the
                noise of the sum, fresh for it; None for none.

        Raises:
            AggregationError: Too few shared, a box is missing, is of another view or does not open; or the values are
                not as said.
        """
        self._check_phase(SumPhase.DELIVERY)
        terms = self._terms
        heard = self._read_message(delivery, m.ShareDelivery)
        shares = self._open_delivery(heard)
        scale = self._checked_scale(values, weight)
        if noise is not None and (noise.shape != values.shape or noise.dtype != np.int64 or weight != 1):
            raise AggregationError(
                SumRefusal.BAD_INPUT,
                f"noise: {noise.dtype}{list(noise.shape)} beside weight {weight}, expected int64 [{terms.length}] and "
                "weight 1, for a weight would raise what one client counts for",
            )
        # from here on the masks count as used, whatever happens
        self.phase = SumPhase.NOTHING
        self._sharers, self._shares = heard.sharers, shares
        self._view = m.view_digest(terms, self._adverts_digest, heard.sharers)
        masks = [
            pair_key(terms.terms_digest, (self._name, self._mask_key), (name, self._adverts[name].mask_key))
            for name in sorted(shares)
        ]
        masks.append(self_mask(terms.terms_digest, self._name, self._seed))
        masked = masked_values(values, terms.ring_encoding, (scale, weight), self._fresh(32), masks, noise)
        self._payload = digest_hex(masked.data.cast("B"))
        deposit = m.Deposit(terms=terms.terms_digest, sender=self._name, view=self._view, payload=self._payload)
        message = m.encode_message(m.sign_message(deposit, self._identity))
        # others keep shares of these; this client needs them no more
        del self._seed, self._mask_key
        self.phase = SumPhase.DEPOSITS
        return MaskedDeposit(message, masked)

    def sign_consent(self, deposits: bytes) -> bytes:
        """Take the list of clients in the sum; return this client's signed consent to it.

        Raises:
            AggregationError: One of them saw other keys than this client, too few are left, or this client is not
                among them.
        """
        self._check_phase(SumPhase.DEPOSITS)
        terms, heard = self._terms, self._read_message(deposits, m.Deposits).deposits
        bodies = [m.check_signed(message, terms, self._peers) for message in heard]
        if any(body.view != self._view for body in bodies):
            raise AggregationError(SumRefusal.OTHER_VIEW, "deposits: a client saw other keys or other names of sharers")
        included = {body.sender: body.payload for body in bodies}
        if [body.sender for body in bodies] != sorted(included):
            raise AggregationError(SumRefusal.MALFORMED, "deposits: expected each sender once, in order")
        if included.get(self._name) != self._payload:
            raise AggregationError(SumRefusal.NOT_INCLUDED, "deposits: this client's own is not there as it sent it")
        check_included(terms, self._graph, self._sharers, list(included))
        self._included = included
        self._included_digest = m.included_digest(terms, self._view, included)
        self.phase = SumPhase.CONSENTS
        consent = m.Consent(terms=terms.terms_digest, sender=self._name, included=self._included_digest)
        return m.encode_message(m.sign_message(consent, self._identity))

    def release_shares(self, consents: bytes) -> bytes:
        """Take the consents of the others; return the shares that take the masks off this sum.

        Raises:
            AggregationError: Fewer clients than the threshold consented to the list that this client consented to.
        """
        self._check_phase(SumPhase.CONSENTS)
        terms, heard = self._terms, self._read_message(consents, m.Consents).consents
        bodies = [m.check_signed(message, terms, self._peers) for message in heard]
        check_consents(terms, self._included, self._included_digest, bodies)
        release = m.ShareRelease(
            terms=terms.terms_digest,
            sender=self._name,
            included=self._included_digest,
            key_shares={name: pair.key for name, pair in self._shares.items() if name not in self._included},
            seed_shares={name: pair.seed for name, pair in self._shares.items() if name in self._included},
        )
        self.phase = SumPhase.NOTHING
        self._shares = {}
        return m.encode_message(m.sign_message(release, self._identity))

    def _open_delivery(self, delivery: m.ShareDelivery) -> dict[str, SharePair]:
        """Check a delivery and open its boxes; every neighbour that shared must have sent exactly one."""
        terms, sharers = self._terms, delivery.sharers
        if list(sharers) != sorted(set(sharers)) or not set(sharers) <= self._adverts.keys():
            raise AggregationError(SumRefusal.MALFORMED, "delivery: expected names out of the adverts, once, in order")
        check_view(terms, self._graph, self._name, sharers)
        boxes = [m.check_signed(message, terms, self._peers) for message in delivery.boxes]
        due = [name for name in self._graph[self._name] if name in set(sharers)]
        if [box.sender for box in boxes] != due or any(box.holder != self._name for box in boxes):
            raise AggregationError(SumRefusal.MALFORMED, "delivery: expected the box of each neighbour that shared")
        if any(box.adverts != self._adverts_digest for box in boxes):
            raise AggregationError(SumRefusal.OTHER_VIEW, "delivery: a neighbour saw other keys")
        return {box.sender: open_box(terms, box, self._box_key, self._adverts[box.sender].box_key) for box in boxes}

    def _checked_scale(self, values: Values, weight: int) -> float:
        terms = self._terms
        if values.shape != (terms.length,) or values.dtype not in (np.float32, np.float64):
            raise AggregationError(
                SumRefusal.BAD_INPUT,
                f"values: {values.dtype}{list(values.shape)}, expected float32 or float64 [{terms.length}]",
            )
        if type(weight) is not int or not 1 <= weight <= terms.max_weight:
            raise AggregationError(SumRefusal.BAD_INPUT, f"weight: {weight}, expected 1 to {terms.max_weight}")
        norm = norm_of(values)
        if not np.isfinite(norm):
            raise AggregationError(SumRefusal.BAD_INPUT, "values: one is NaN, infinite or too large to square")
        return terms.ring_encoding.scale_for(norm)

    def _read_message(self, data: bytes, kind: type[m.Message]) -> m.Message:
        return m.decode_message(data, kind, len(self._terms.cohort))

    def _check_phase(self, due: SumPhase) -> None:
        """Raise unless the client waits for this message, in the process in which it was made."""
        if self.phase is not due:
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{due.name.lower()}: the client is at {self.phase.name}")
        if os.getpid() != self._pid:
            raise AggregationError(
                SumRefusal.OUT_OF_PHASE, "this process was forked from the client's: masks would repeat"
            )

    def __repr__(self) -> str:
        return f"SumClient({self._name!r}, {self.phase.name})"
