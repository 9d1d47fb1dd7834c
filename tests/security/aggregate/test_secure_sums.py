"""A secure sum is the sum of those that are left, exactly, and names them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summed_round import PHASES, SERVER, Walk, clients_of, terms_of, values_for

from phalanx.errors import AggregationError
from phalanx.security.aggregate import SumRefusal, SumServer, degree_of, max_colluding, threshold_of
from phalanx.security.aggregate.encoding import CHUNK, RingEncoding, norm_of
from phalanx.security.aggregate.graph import neighbours_of


class PlainWalk(Walk):
    """A walk that keeps what each client encoded, by taking its masks off with the client's own keys."""

    def run(self):
        from phalanx.security.aggregate import client

        self.plain = {}
        real = client.masked_values

        def keeping(values, encoding, scale_and_weight, rounding_key, masks, noise):
            current = len(self.plain)
            self.plain[self.here("mask")[current]] = real(values, encoding, scale_and_weight, rounding_key, [], noise)
            return real(values, encoding, scale_and_weight, rounding_key, masks, noise)

        client.masked_values = keeping
        try:
            return super().run()
        finally:
            client.masked_values = real


def test_the_sum_is_exact_in_every_bit_and_the_mean_near_the_mean():
    terms = terms_of(6, length=CHUNK + 7, max_weight=9, clip=2.0)
    weights = {name: 1 + number for number, name in enumerate(terms.client_names)}
    walk = PlainWalk(terms, values_for(terms), weights=weights)

    result = walk.run()

    plain = sum(one.astype(np.int64) for one in walk.plain.values()) % 2**32
    assert np.array_equal(result.total.view(np.uint32), plain[:-1].astype(np.uint32))
    assert result.weight == sum(weights.values()) == plain[-1]
    mean = sum(weights[name] * one.astype(np.float64) for name, one in walk.values.items()) / result.weight
    assert np.abs(result.mean_values() - mean).max() <= terms.ring_encoding.step_size
    assert result.contributors == terms.client_names
    assert result.dropped == () == tuple(result.liars)


@pytest.mark.parametrize("count", [4, 10, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", PHASES)
def test_as_many_as_the_threshold_lets_may_fall_silent_in_any_phase(count, phase):
    terms = terms_of(count)
    lost = set(terms.client_names[: count - terms.consent_threshold])
    walk = PlainWalk(terms, values_for(terms), silent={phase: lost})

    result = walk.run()

    left = set(terms.client_names) - (lost if phase in ("join", "share", "mask") else set())
    assert set(result.contributors) == left
    assert len(lost) == (count - 1) // 3
    plain = sum(walk.plain[name].astype(np.int64) for name in left) % 2**32
    assert np.array_equal(result.total.view(np.uint32), plain[:-1].astype(np.uint32))


@pytest.mark.parametrize("phase", PHASES)
def test_one_more_that_falls_silent_ends_the_round_without_a_sum(phase):
    terms = terms_of(7)
    lost = set(terms.client_names[: 7 - terms.consent_threshold + 1])

    with pytest.raises(AggregationError, match="too_few"):
        Walk(terms, values_for(terms), silent={phase: lost}).run()


def test_clients_may_fall_silent_one_after_the_other_over_all_phases():
    terms = terms_of(16)
    names = iter(terms.client_names)
    silent = {phase: {next(names)} for phase in PHASES}

    result = Walk(terms, values_for(terms), silent=silent).run()

    assert len(result.contributors) == 13


@given(seed=st.integers(0, 2**32), count=st.integers(3, 9), weight=st.integers(1, 50))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_a_sum_at_its_bounds_never_wraps(seed, count, weight):
    terms = terms_of(count, max_weight=weight, length=2, clip=0.25)
    sign = 1 if seed % 2 else -1
    values = dict.fromkeys(terms.client_names, np.array([sign * 1e6, 0.0]))

    result = Walk(terms, values, weights=dict.fromkeys(terms.client_names, weight)).run()

    assert abs(int(result.total[0])) == count * weight * terms.ring_encoding.max_level < 2**31
    assert result.mean_values()[0] == pytest.approx(sign * 0.25, rel=1e-6)


def test_values_are_scaled_to_the_clip_and_rounded_without_bias():
    encoding = RingEncoding(clients=10, clip=1.0, max_weight=800_000)
    values = np.full(40_000, 0.3 * encoding.step_size)
    out, random = np.empty(40_000, np.uint32), np.random.default_rng(1).integers(0, 2**32, 40_000, np.uint32)

    encoding.round_into(values, 1 / encoding.step_size, 1, random, out)

    assert set(out) == {0, 1}
    assert out.mean() == pytest.approx(0.3, abs=0.01)
    assert encoding.scale_for(norm_of(np.array([3.0, 4.0]))) * encoding.step_size == pytest.approx(0.2)
    assert encoding.scale_for(0.5) * encoding.step_size == encoding.scale_for(0.0) * encoding.step_size == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_without_a_norm_are_refused_and_may_be_given_again(bad):
    terms = terms_of(4)
    walk = Walk(terms, values_for(terms))
    first = terms.client_names[0]
    walk.values[first] = np.array([0, 0, bad, 0, 0])
    walk.clients = clients_of(terms)

    with pytest.raises(AggregationError, match="bad_input"):
        walk.run()

    assert walk.clients[first].phase.name == "DELIVERY"


@pytest.mark.parametrize(
    ("values", "weight"),
    [
        (np.zeros(4, np.float32), 1),
        (np.zeros((5, 1), np.float32), 1),
        (np.zeros(5, np.int64), 1),
        (np.zeros(5), 0),
        (np.zeros(5), 2),
        (np.zeros(5), True),
        (np.zeros(5), 1.0),
    ],
)
def test_values_or_weights_that_are_not_as_agreed_are_refused(values, weight):
    terms = terms_of(4)
    walk = Walk(terms, dict.fromkeys(terms.client_names, values), weights=dict.fromkeys(terms.client_names, weight))

    with pytest.raises(AggregationError, match="bad_input"):
        walk.run()


@pytest.mark.parametrize("count", [3, 4, 5, 19, 20])
def test_a_small_cohort_is_a_complete_graph_with_a_threshold_above_two_thirds(count):
    degree = degree_of(count, 3)

    assert degree == (count - 1, threshold_of(count) - 1)
    assert 3 * threshold_of(count) > 2 * count
    assert 2 * threshold_of(count) - count > max_colluding(count)
    assert degree.shares > max_colluding(count)


@pytest.mark.parametrize("count", [100, 400, 1000])
def test_a_large_cohort_has_fewer_neighbours_that_hide_a_client_whoever_drops_out(count):
    degree = degree_of(count, 5)
    colluding, others = max_colluding(count), count - 1

    # of the neighbours in the sum at least `minimum - 1` are honest, but in 2^-120 of all orders
    tail = sum(
        math.comb(colluding, bad) * math.comb(others - colluding, degree.neighbours - bad)
        for bad in range(degree.shares - 5 + 2, min(colluding, degree.neighbours) + 1)
    )

    assert degree.neighbours % 2 == 0
    assert degree.neighbours < others
    assert tail * count * 2**120 <= math.comb(others, degree.neighbours)
    assert degree.shares >= degree.neighbours / 3


def test_neighbours_are_mutual_equally_many_and_in_an_order_that_the_seed_decides():
    names = [f"site-{number}" for number in range(200)]

    graph = neighbours_of(names, b"\1" * 32, 5)

    assert {len(set(found)) for found in graph.values()} == {degree_of(200, 5).neighbours}
    assert all(name in graph[other] and name != other for name in names for other in graph[name])
    assert graph != neighbours_of(names, b"\2" * 32, 5)


@pytest.mark.slow
def test_a_sparse_round_of_90_clients_ends_after_a_sixth_fell_silent():
    from phalanx.security.crypto import Identity

    more = [Identity.without_certificate(f"site-{number:02d}") for number in range(40, 90)]
    from summed_round import CLIENTS

    CLIENTS.extend(more)
    try:
        terms = terms_of(90)
        assert terms.graph_degree.neighbours < 89
        lost = set(terms.client_names[::6])
        walk = PlainWalk(terms, values_for(terms), silent={"mask": lost})

        result = walk.run()

        plain = sum(walk.plain[name].astype(np.int64) for name in result.contributors) % 2**32
        assert np.array_equal(result.total.view(np.uint32), plain[:-1].astype(np.uint32))
    finally:
        del CLIENTS[40:]


def test_a_client_that_gives_out_another_share_is_named_and_the_sum_is_there_all_the_same():
    terms = terms_of(7)
    walk = Walk(terms, values_for(terms))
    walk.clients = clients_of(terms)
    liar = walk.clients[terms.client_names[2]]
    real = liar.mask_values

    def lying(*given):
        deposit = real(*given)
        first = next(iter(liar._shares))
        liar._shares[first] = liar._shares[first]._replace(seed="00" * 33)
        return deposit

    liar.mask_values = lying

    result = walk.run()

    assert result.contributors == terms.client_names
    assert list(result.liars) == [terms.client_names[2]]


def test_a_client_that_deals_shares_of_another_secret_is_named_by_its_own_signatures():
    terms = terms_of(4)
    walk = Walk(terms, values_for(terms))
    walk.clients = clients_of(terms)
    cheat = walk.clients[terms.client_names[1]]
    real = cheat.share_secrets

    def dealing(adverts):
        cheat._seed, own = b"\7" * 32, cheat._seed
        message = real(adverts)
        cheat._seed = own
        return message

    cheat.share_secrets = dealing

    with pytest.raises(AggregationError) as refused:
        walk.run()

    assert (refused.value.reason, refused.value.culprit) == (SumRefusal.BAD_SHARE, terms.client_names[1])


def test_a_deposit_with_other_values_than_signed_for_is_not_added():
    terms = terms_of(4)
    server, clients = SumServer(terms, SERVER), clients_of(terms)
    for client in clients.values():
        server.take_advert(client.join_round(server.invitation))
    adverts = server.close_adverts()
    for client in clients.values():
        server.take_boxes(client.share_secrets(adverts))
    deliveries = server.close_boxes()
    name = terms.client_names[0]
    deposit = clients[name].mask_values(deliveries[name], np.zeros(5))

    with pytest.raises(AggregationError, match="other values"):
        server.take_deposit(deposit.message, deposit.values + np.uint32(1))
    with pytest.raises(AggregationError, match="malformed"):
        server.take_deposit(deposit.message, deposit.values[:-1])
    server.take_deposit(deposit.message, deposit.values)
    with pytest.raises(AggregationError, match="out_of_phase"):
        server.take_deposit(deposit.message, deposit.values)
