"""The server of a secure sum: it passes signed messages on, adds up masked values, and takes the masks off the sum.

It holds no secret. What it says is believed by no client without the signatures of the others. A message that is
refused changes nothing; a phase ends when the caller closes it, and a client that comes too late is out of the round.
"""

from collections.abc import Sized
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from phalanx.errors import AggregationError
from phalanx.security.aggregate import messages as m
from phalanx.security.aggregate.boxes import is_share_of
from phalanx.security.aggregate.encoding import RingEncoding, Words
from phalanx.security.aggregate.masks import Mask, add_masks, pair_key, self_mask
from phalanx.security.aggregate.messages import SumRefusal
from phalanx.security.aggregate.shamir import combine_shares
from phalanx.security.aggregate.terms import SumTerms
from phalanx.security.aggregate.view import check_included
from phalanx.security.crypto import Identity, Peer, digest_hex


class ServerPhase(IntEnum):
    """The messages that a server collects."""

    ADVERTS = 0
    BOXES = 1
    DEPOSITS = 2
    CONSENTS = 3
    RELEASES = 4
    NOTHING = 5


@dataclass(frozen=True)
class SumResult:
    """A sum without masks.

    Attributes:
        total: The sum of the clients' encoded values times weights, exact, ``[length]``.
        liars: Clients that released a share other than their dealt one, with a description of the fault.
    """

    total: NDArray[np.int32]
    weight: int
    encoding: RingEncoding
    contributors: tuple[str, ...]
    dropped: tuple[str, ...]
    liars: dict[str, str] = field(default_factory=dict)

    def mean_values(self) -> NDArray[np.float32]:
        """Return the weighted mean of the clients' values."""
        return self.encoding.weighted_mean(self.total.view(np.uint32), self.weight)


class SumServer:
    """The server's side of one round.

    `bringer` is the client that delivered a message, as the carrier proves; it must have signed the message. It is
    empty for a carrier that proves no sender.

    Guarantees:
        The total is the exact sum over the clients that consented; a wrong share does not match the digest that its
        dealer signed, is left out, and its sender named. Values of at most the third that the threshold allows may be
        missing. Whether a client's values make sense is not checked.
    """

    def __init__(self, terms: SumTerms, identity: Identity) -> None:
        self.terms, self.phase = terms, ServerPhase.ADVERTS
        self.invitation = m.sign_terms(terms, identity)
        self._peers = {member.name: Peer.from_hex(member.name, member.key) for member in terms.cohort}
        self._adverts: dict[str, m.SignedMessage[m.Advert]] = {}
        self._boxes: dict[str, dict[str, m.SignedMessage[m.ShareBox]]] = {}
        self._deposits: dict[str, m.SignedMessage[m.Deposit]] = {}
        self._consents: dict[str, m.SignedMessage[m.Consent]] = {}
        self._releases: dict[str, m.ShareRelease] = {}
        self._total = np.zeros(terms.length + 1, np.uint32)

    def take_advert(self, data: bytes, bringer: str = "") -> str:
        """Take a client's keys, and return its name.

        Raises:
            AggregationError: They are malformed, of another round, not signed by it, or a second time there.
        """
        message, body = self._read_message(data, m.SignedMessage[m.Advert], ServerPhase.ADVERTS, self._adverts, bringer)
        self._adverts[body.sender] = message
        return body.sender

    def close_adverts(self) -> bytes:
        """Close the phase; return all keys, for each client that sent some.

        Raises:
            AggregationError: Fewer came than the threshold.
        """
        self._close_phase(ServerPhase.ADVERTS, self._adverts)
        ordered = tuple(self._adverts[name] for name in sorted(self._adverts))
        self._adverts_digest = m.adverts_digest(self.terms, ordered)
        self._graph = self.terms.neighbours_by_client(self._adverts_digest)
        return m.encode_message(m.Adverts(adverts=ordered))

    def take_boxes(self, data: bytes, bringer: str = "") -> str:
        """Take a client's boxes, and return its name.

        Raises:
            AggregationError: They are not one box for each of its neighbours, signed by it in this round.
        """
        self._check_phase(ServerPhase.BOXES)
        heard = m.decode_message(data, m.Boxes, len(self.terms.cohort)).boxes
        bodies = [m.check_signed(message, self.terms, self._peers) for message in heard]
        senders = {body.sender for body in bodies}
        if len(senders) != 1 or not senders <= self._adverts.keys() or senders & self._boxes.keys():
            raise AggregationError(SumRefusal.MALFORMED, "boxes: expected those of one client that sent keys, once")
        (sender,) = senders
        _check_bringer(sender, bringer)
        due = [name for name in self._graph[sender] if name in self._adverts]
        if [body.holder for body in bodies] != due:
            raise AggregationError(SumRefusal.MALFORMED, f"{sender}: expected a box for each neighbour", culprit=sender)
        if any(body.adverts != self._adverts_digest for body in bodies):
            raise AggregationError(SumRefusal.OTHER_VIEW, f"{sender}: saw other keys", culprit=sender)
        self._boxes[sender] = {message.body.holder: message for message in heard}
        return sender

    def close_boxes(self) -> dict[str, bytes]:
        """Close the phase; return the delivery of each client that shared.

        Raises:
            AggregationError: Fewer shared than the threshold.
        """
        self._close_phase(ServerPhase.BOXES, self._boxes)
        self._sharers = tuple(sorted(self._boxes))
        self._view = m.view_digest(self.terms, self._adverts_digest, self._sharers)
        return {
            holder: m.encode_message(
                m.ShareDelivery(
                    sharers=self._sharers,
                    boxes=tuple(self._boxes[name][holder] for name in self._graph[holder] if name in self._boxes),
                )
            )
            for holder in self._sharers
        }

    def take_deposit(self, data: bytes, values: Words, bringer: str = "") -> str:
        """Take a client's masked values, add them up, and return its name.

        Raises:
            AggregationError: The statement is malformed, of another view or not signed; or the values are others than
                it says.
        """
        message, body = self._read_message(
            data, m.SignedMessage[m.Deposit], ServerPhase.DEPOSITS, self._deposits, bringer
        )
        if body.sender not in self._boxes or body.view != self._view:
            raise AggregationError(SumRefusal.OTHER_VIEW, f"{body.sender}: saw others than this round's sharers")
        if values.dtype != np.uint32 or values.shape != self._total.shape or not values.flags.c_contiguous:
            raise AggregationError(
                SumRefusal.MALFORMED, f"{body.sender}: {values.dtype}{list(values.shape)}, expected {self._total.shape}"
            )
        if digest_hex(values.data.cast("B")) != body.payload:
            raise AggregationError(SumRefusal.MALFORMED, f"{body.sender}: signed for other values than came")
        np.add(self._total, values, out=self._total)
        self._deposits[body.sender] = message
        return body.sender

    def close_deposits(self) -> bytes:
        """Close the phase; return the list of those in the sum, for each of them.

        Raises:
            AggregationError: Too few are left for a sum that any client would agree to.
        """
        self._close_phase(ServerPhase.DEPOSITS, self._deposits)
        self._included = {name: self._deposits[name].body.payload for name in sorted(self._deposits)}
        check_included(self.terms, self._graph, self._sharers, self._included)
        self._included_digest = m.included_digest(self.terms, self._view, self._included)
        return m.encode_message(m.Deposits(deposits=tuple(self._deposits[name] for name in self._included)))

    @property
    def included_clients(self) -> tuple[str, ...]:
        """The clients in the sum, by name; known once `close_deposits` has returned."""
        return tuple(self._included)

    def take_consent(self, data: bytes, bringer: str = "") -> str:
        """Take a client's consent, and return its name.

        Raises:
            AggregationError: It is not for this sum, or not signed by a client in it.
        """
        message, body = self._read_message(
            data, m.SignedMessage[m.Consent], ServerPhase.CONSENTS, self._consents, bringer
        )
        if body.sender not in self._included or body.included != self._included_digest:
            raise AggregationError(SumRefusal.OTHER_VIEW, f"{body.sender}: gave its word for another sum")
        self._consents[body.sender] = message
        return body.sender

    def close_consents(self) -> bytes:
        """Close the phase; return all consents, for each client that gave one.

        Raises:
            AggregationError: Fewer came than the threshold.
        """
        self._close_phase(ServerPhase.CONSENTS, self._consents)
        return m.encode_message(m.Consents(consents=tuple(self._consents[name] for name in sorted(self._consents))))

    def take_release(self, data: bytes, bringer: str = "") -> str:
        """Take a client's shares, and return its name.

        Raises:
            AggregationError: They are malformed, or not signed by a client that gave its word.
        """
        self._check_phase(ServerPhase.RELEASES)
        message = m.decode_message(data, m.SignedMessage[m.ShareRelease], len(self.terms.cohort))
        body = m.check_signed(message, self.terms, self._peers)
        _check_bringer(body.sender, bringer)
        is_due = body.sender in self._consents and body.sender not in self._releases
        if not is_due or body.included != self._included_digest:
            raise AggregationError(SumRefusal.OTHER_VIEW, f"{body.sender}: shares that are not due")
        self._releases[body.sender] = body
        return body.sender

    def unmask_sum(self) -> SumResult:
        """Take the masks off and return the sum; the last step.

        Raises:
            AggregationError: Fewer right shares than the threshold arrived, or the shares of a client, named as
                culprit, give a secret other than its digest.
        """
        self._check_phase(ServerPhase.RELEASES)
        liars: dict[str, str] = {}
        masks: list[Mask] = []
        for name in self._sharers:
            secret = self._recover_secret(name, "seed" if name in self._included else "key", liars)
            masks += self._masks_left(name, secret)
        add_masks(self._total, [mask.cancelling_mask for mask in masks])
        self.phase = ServerPhase.NOTHING
        dropped = tuple(name for name in self.terms.client_names if name not in self._included)
        weight = int(self._total[-1])
        if not 1 <= weight <= self.terms.max_weight * len(self._included):
            raise AggregationError(
                SumRefusal.BAD_INPUT, "the sum has an impossible weight: a client's masks are not its own"
            )
        total = self._total[:-1].view(np.int32)
        return SumResult(total, weight, self.terms.ring_encoding, tuple(self._included), dropped, liars)

    def _masks_left(self, name: str, secret: bytes) -> list[Mask]:
        """Return the masks that a client left in the sum: its own, or the ones that it shares with its neighbours."""
        terms, advert = self.terms.terms_digest, self._adverts[name].body
        if name in self._included:
            if m.seed_digest(self.terms, name, secret) != advert.seed_digest:
                raise _bad_dealer(name)
            return [self_mask(terms, name, secret)]
        private = X25519PrivateKey.from_private_bytes(secret)
        if private.public_key().public_bytes_raw().hex() != advert.mask_key:
            raise _bad_dealer(name)
        others = [(other, self._adverts[other].body.mask_key) for other in self._graph[name] if other in self._included]
        return [pair_key(terms, (name, private), other).cancelling_mask for other in others]

    def _recover_secret(self, dealer: str, kind: str, liars: dict[str, str]) -> bytes:
        """Return a client's secret from the shares that are, by its own signed digests, those it dealt."""
        shares: dict[int, bytes] = {}
        for holder in self._graph[dealer]:
            release = self._releases.get(holder)
            share = None if release is None else getattr(release, f"{kind}_shares").get(dealer)
            if share is not None and is_share_of(self.terms, self._boxes[dealer][holder].body, kind, share):
                shares[self.terms.client_names.index(holder) + 1] = bytes.fromhex(share)
            elif release is not None:
                liars[holder] = f"gave out another share of {dealer} than it was dealt"
        needed = self.terms.graph_degree.shares
        if len(shares) < needed:
            raise AggregationError(
                SumRefusal.TOO_FEW, f"{dealer}: {len(shares)} right shares of its {kind}, {needed} are needed"
            )
        secret = combine_shares(dict(list(shares.items())[:needed]))
        if secret is None:
            raise _bad_dealer(dealer)
        return secret

    def _read_message(
        self,
        data: bytes,
        kind: type[m.SignedMessage[m.Body]],
        phase: ServerPhase,
        known: dict[str, m.SignedMessage[m.Body]],
        bringer: str,
    ) -> tuple[m.SignedMessage[m.Body], m.Body]:
        self._check_phase(phase)
        message = m.decode_message(data, kind)
        body = m.check_signed(message, self.terms, self._peers)
        _check_bringer(body.sender, bringer)
        if body.sender in known:
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{body.sender}: sent this before")
        return message, body

    def _close_phase(self, phase: ServerPhase, received: Sized) -> None:
        """Begin the next phase, if as many clients have answered in this one as the threshold asks for."""
        self._check_phase(phase)
        if len(received) < self.terms.consent_threshold:
            raise AggregationError(
                SumRefusal.TOO_FEW,
                f"{phase.name.lower()}: {len(received)} of {len(self.terms.cohort)} clients, "
                f"{self.terms.consent_threshold} needed",
            )
        self.phase = ServerPhase(phase + 1)

    def _check_phase(self, due: ServerPhase) -> None:
        if self.phase is not due:
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{due.name.lower()}: the server is at {self.phase.name}")


def _check_bringer(sender: str, bringer: str) -> None:
    if bringer and bringer != sender:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{bringer}: handed in a message of {sender}")


def _bad_dealer(name: str) -> AggregationError:
    return AggregationError(
        SumRefusal.BAD_SHARE, f"{name}: dealt shares of another secret than it said; remove it", culprit=name
    )
