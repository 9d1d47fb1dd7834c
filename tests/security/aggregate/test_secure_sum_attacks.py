"""A server that lies: honest clients refuse it, and each attack wins where its defence is switched off."""

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from summed_round import CLIENTS, SERVER, ForgetfulRounds, RoundsInMemory, Walk, clients_of, expected_of, terms_of

from phalanx.errors import AggregationError
from phalanx.security.aggregate import SumClient, SumServer, SumTerms, client, graph, terms
from phalanx.security.aggregate import messages as m
from phalanx.security.aggregate.masks import add_masks, pair_key, self_mask
from phalanx.security.aggregate.shamir import combine_shares
from phalanx.security.crypto import Identity

SECRET = np.array([0.1, -0.2, 0.3, -0.4, 0.5], np.float32)


class LyingServer(SumServer):
    """A server with colluding clients, of which it reads keys and shares, and a victim."""

    def __init__(self, given: SumTerms, colluding: int) -> None:
        super().__init__(given, SERVER)
        self.victim = given.client_names[0]
        self.colluding = set(given.client_names[len(given.client_names) - colluding :])
        self.clients = clients_of(given)
        self.keys: dict[str, bytes] = {}
        self.deposited: dict[str, np.ndarray] = {}
        self.given: dict[str, dict[str, dict[int, bytes]]] = {"key": {}, "seed": {}}

    def reach_delivery(self) -> None:
        for name, one in self.clients.items():
            self.take_advert(one.join_round(self.invitation))
            if name in self.colluding:
                self.keys[name] = one._mask_key.private_bytes_raw()
        adverts = self.close_adverts()
        for one in self.clients.values():
            self.take_boxes(one.share_secrets(adverts))

    def reach_deposits(self, deliveries: dict[str, bytes]) -> None:
        for name, one in self.clients.items():
            deposit = one.mask_values(deliveries[name], SECRET if name == self.victim else np.zeros(5))
            self._deposits[name] = m.decode_message(deposit.message, m.SignedMessage[m.Deposit])
            self.deposited[name] = deposit.values
            if name in self.colluding:
                for dealer, pair in one._shares.items():
                    self.keep("key", dealer, name, pair.key)
                    self.keep("seed", dealer, name, pair.seed)

    def list_of(self, names) -> bytes:
        return m.encode_message(m.Deposits(deposits=tuple(self._deposits[name] for name in sorted(names))))

    def release(self, name: str, consents: dict[str, bytes]) -> None:
        message = m.encode_message(
            m.Consents(
                consents=tuple(m.decode_message(one, m.SignedMessage[m.Consent]) for _, one in sorted(consents.items()))
            )
        )
        body = m.decode_message(self.clients[name].release_shares(message), m.SignedMessage[m.ShareRelease]).body
        for dealer, share in body.key_shares.items():
            self.keep("key", dealer, name, share)
        for dealer, share in body.seed_shares.items():
            self.keep("seed", dealer, name, share)

    def keep(self, kind: str, dealer: str, holder: str, share: str) -> None:
        number = self.terms.client_names.index(holder) + 1
        self.given[kind].setdefault(dealer, {})[number] = bytes.fromhex(share)

    def secret(self, kind: str, name: str) -> bytes | None:
        shares = self.given[kind].get(name, {})
        return combine_shares(shares) if len(shares) >= self.terms.graph_degree.shares else None

    def stolen(self) -> np.ndarray | None:
        """The victim's values, if every mask on them is known."""
        seed, own = self.secret("seed", self.victim), self.secret("key", self.victim)
        masks = [] if seed is None else [self_mask(self.terms.terms_digest, self.victim, seed).cancelling_mask]
        public = self._adverts[self.victim].body.mask_key
        for other in self.masked_with:
            key = own or self.keys.get(other) or self.secret("key", other)
            if key is None or seed is None:
                return None
            there = (other, self._adverts[other].body.mask_key)
            private = X25519PrivateKey.from_private_bytes(key)
            masks.append(
                pair_key(self.terms.terms_digest, (self.victim, private), there).cancelling_mask
                if own
                else pair_key(self.terms.terms_digest, (other, private), (self.victim, public))
            )
        total = self.deposited[self.victim].copy()
        add_masks(total, masks)
        return self.terms.ring_encoding.weighted_mean(total[:-1], int(total[-1]))


def is_stolen(server: LyingServer) -> bool:
    found = server.stolen()
    return found is not None and np.abs(found - SECRET).max() <= 2 * server.terms.ring_encoding.step_size


def two_views() -> LyingServer:
    """Tell one client that the victim is in the sum, and another one that it dropped out."""
    server = LyingServer(terms_of(4), colluding=1)
    server.reach_delivery()
    server.reach_deposits(server.close_boxes())
    everyone, (_, a, b, c) = set(server.clients), server.clients
    server.masked_with = everyone - {server.victim}
    with_victim, without = server.list_of(everyone), server.list_of(everyone - {server.victim})
    shown = {server.victim: with_victim, a: with_victim, b: without, c: without}
    consents = {name: server.clients[name].sign_consent(shown[name]) for name in everyone}
    server.release(a, {name: consents[name] for name in (server.victim, a)})
    server.release(b, {name: consents[name] for name in (b, c)})
    return server


def test_two_views_of_who_is_in_the_sum_are_refused():
    with pytest.raises(AggregationError, match="too_few: 2 of 4 consents"):
        two_views()


def test_two_views_show_a_clients_values_where_consents_are_not_compared(monkeypatch):
    monkeypatch.setattr(client, "check_consents", lambda *_: None)

    assert is_stolen(two_views())


def all_but_one() -> LyingServer:
    """Say that all honest clients but the victim dropped out."""
    server = LyingServer(terms_of(9), colluding=2)
    server.reach_delivery()
    server.reach_deposits(server.close_boxes())
    left = {server.victim, *server.colluding}
    server.masked_with = set(server.clients) - {server.victim}
    consents = {name: server.clients[name].sign_consent(server.list_of(left)) for name in left}
    server.release(server.victim, consents)
    return server


def test_a_server_that_drops_all_but_one_is_refused():
    with pytest.raises(AggregationError, match="too_few: 3 of 9 clients in the sum, 7 are needed"):
        all_but_one()


def test_dropping_all_but_one_shows_its_values_where_the_threshold_is_low(monkeypatch):
    monkeypatch.setattr(terms, "threshold_of", lambda count: 3)
    monkeypatch.setattr(terms, "degree_of", lambda count, minimum: graph.Degree(count - 1, 2))

    assert is_stolen(all_but_one())


def other_sharers() -> LyingServer:
    """Show the victim only neighbours that will drop out or collude, so that each mask on it becomes known."""
    server = LyingServer(terms_of(10), colluding=3)
    server.reach_delivery()
    victim, *others = server.clients
    lost, kept = others[:3], others[3:6]
    deliveries = server.close_boxes()
    shown = m.decode_message(deliveries[victim], m.ShareDelivery)
    sharers = tuple(sorted({victim, *lost, *server.colluding}))
    boxes = tuple(one for one in shown.boxes if one.body.sender in sharers)
    deliveries[victim] = m.encode_message(m.ShareDelivery(sharers=sharers, boxes=boxes))
    server.reach_deposits(deliveries)
    server.masked_with = {*lost, *server.colluding}
    left = {victim, *kept, *server.colluding}
    consents = {name: server.clients[name].sign_consent(server.list_of(left)) for name in sorted(left, reverse=True)}
    for name in (victim, *kept):
        server.release(name, consents)
    return server


def test_other_sharers_for_one_client_are_refused_by_all():
    with pytest.raises(AggregationError, match="other_view"):
        other_sharers()


def test_other_sharers_show_a_clients_values_where_views_are_not_compared(monkeypatch):
    real = client.check_included
    monkeypatch.setattr(m, "view_digest", lambda *_: "3" * 64)
    monkeypatch.setattr(client, "check_included", lambda t, g, _, included: real(t, g, t.client_names, included))

    assert is_stolen(other_sharers())


def same_round_twice(rounds) -> np.ndarray:
    """Ask for one round twice, the second time without the victim, and take the difference."""
    given = terms_of(7)
    values = {name: SECRET if name == given.client_names[0] else np.full(5, 0.01) for name in given.client_names}
    books = {name: rounds() for name in given.client_names}
    sums = []
    for silent in ({}, {"join": {given.client_names[0]}}):
        one = Walk(given, values, silent)
        known = {c.name: c for c in CLIENTS}
        one.clients = {name: SumClient(known[name], expected_of(given), books[name]) for name in given.client_names}
        sums.append(one.run())
    return (sums[0].total - sums[1].total) * given.ring_encoding.step_size


def test_the_same_round_is_refused_the_second_time():
    with pytest.raises(AggregationError, match="repeated_round"):
        same_round_twice(RoundsInMemory)


def test_the_same_round_twice_shows_a_clients_values_to_clients_without_a_book_of_rounds():
    assert np.abs(same_round_twice(ForgetfulRounds) - SECRET).max() < 1e-6


def played_by_the_server(kind) -> np.ndarray:
    """Be all other clients, under their names and with keys of the server's own."""
    given = terms_of(5)
    victim = given.client_names[0]
    fakes = {name: Identity.without_certificate(name) for name in given.client_names[1:]}
    joined = kind(CLIENTS[0], expected_of(given), RoundsInMemory())
    cohort = [member if member.name == victim else fake_member(fakes[member.name]) for member in given.cohort]
    own = given.model_copy(update={"cohort": tuple(cohort)})
    server = SumServer(given, SERVER)
    server._peers = {member.name: m.Peer.from_hex(member.name, member.key) for member in own.cohort}
    others = {name: Pretender(one, given) for name, one in fakes.items()}
    walk = Walk(given, {name: SECRET if name == victim else np.zeros(5) for name in given.client_names})
    walk.clients = {victim: joined, **others}
    for name in given.client_names:
        server.take_advert(walk.clients[name].join_round(server.invitation))
    adverts = server.close_adverts()
    for name in given.client_names:
        server.take_boxes(walk.clients[name].share_secrets(adverts))
    deliveries = server.close_boxes()
    for name in given.client_names:
        deposit = walk.clients[name].mask_values(deliveries[name], walk.values[name])
        server.take_deposit(deposit.message, deposit.values)
    deposits = server.close_deposits()
    for name in given.client_names[1:]:
        server.take_consent(walk.clients[name].sign_consent(deposits))
    consents = server.close_consents()
    for name in given.client_names[1:]:
        server.take_release(walk.clients[name].release_shares(consents))
    return server.unmask_sum().total * given.ring_encoding.step_size


def fake_member(identity):
    return terms.CohortMember(name=identity.name, key=identity.public.public_key.hex())


class Pretender(SumClient):
    """A client of the server's: it believes every signature."""

    def __init__(self, identity, given) -> None:
        super().__init__(identity, expected_of(given), ForgetfulRounds())

    def _check_phase(self, due) -> None:
        if due.name == "ADVERTS":
            self._peers = AnyPeers()


class AnyPeers(dict):
    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str):
        return BelievedPeer(name)


class BelievedPeer:
    def __init__(self, name: str) -> None:
        self.name = name

    def verify_signature(self, signature: bytes, data: bytes) -> None:
        pass


def test_keys_that_their_clients_did_not_sign_are_refused():
    with pytest.raises(AggregationError, match="foreign_party: site-01: the signature does not match"):
        played_by_the_server(SumClient)


def test_a_server_that_plays_all_others_learns_everything_where_keys_are_not_signed():
    class TrustingClient(Pretender):
        def __init__(self, identity, expected, rounds) -> None:
            SumClient.__init__(self, identity, expected, rounds)

    assert np.abs(played_by_the_server(TrustingClient) - SECRET).max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "run-2"}, "foreign_terms"),
        ({"run_digest": "3" * 64}, "foreign_terms"),
        ({"model_digest": "3" * 64}, "foreign_terms"),
        ({"length": 6}, "foreign_terms"),
        ({"minimum": 4}, "small_cohort"),
        ({"roster": {}}, "foreign_party"),
        ({"roster": {one.name: replace(CLIENTS[9].public, name=one.name) for one in CLIENTS}}, "foreign_party"),
        ({"server": CLIENTS[9].public}, "foreign_party"),
    ],
)
def test_terms_that_are_not_what_the_client_knows_are_refused_and_no_round_is_entered(changes, reason):
    given, book = terms_of(4), RoundsInMemory()
    one = SumClient(CLIENTS[0], expected_of(given, **changes), book)

    with pytest.raises(AggregationError, match=reason):
        one.join_round(SumServer(given, SERVER).invitation)

    assert book.last == {}


def test_a_client_that_is_not_in_the_cohort_does_not_join():
    given = terms_of(4)

    with pytest.raises(AggregationError, match="not_included"):
        SumClient(CLIENTS[7], expected_of(given), RoundsInMemory()).join_round(SumServer(given, SERVER).invitation)


@pytest.mark.parametrize(
    "changes",
    [{"minimum": 2}, {"minimum": 4}, {"max_weight": 2**20, "clip": 1.0}, {"clip": 0.0}, {"round": 0}, {"length": 0}],
)
def test_terms_that_would_not_protect_or_could_wrap_cannot_be_written(changes):
    with pytest.raises(ValueError, match="validation error"):
        terms_of(*((9,) if "max_weight" in changes else (4,)), **changes)


def test_a_key_of_low_order_is_refused_by_name(monkeypatch):
    walk = Walk(terms_of(4), dict.fromkeys(terms_of(4).client_names, SECRET))
    walk.clients = clients_of(walk.terms)
    cheat = walk.clients[walk.terms.client_names[3]]
    real = cheat.join_round

    def weak(invitation):
        real(invitation)
        body = cheat._own_advert.body.model_copy(update={"mask_key": "00" * 32})
        cheat._own_advert = m.sign_message(body, CLIENTS[3])
        return m.encode_message(cheat._own_advert)

    cheat.join_round = weak

    with pytest.raises(AggregationError, match="low order") as refused:
        walk.run()

    assert refused.value.culprit == cheat._name


def test_a_forked_copy_of_a_client_masks_nothing(monkeypatch):
    one = clients_of(terms_of(4))["site-00"]
    monkeypatch.setattr(client.os, "getpid", lambda: 1)

    with pytest.raises(AggregationError, match="forked"):
        one.join_round(SumServer(terms_of(4), SERVER).invitation)
