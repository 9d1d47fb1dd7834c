"""Noise that clients of a secure sum bring: what the server sees, how much it is, and which shares count."""

import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from late_imports import LateModule
from phalanx.errors import AggregationError, ConfigError
from phalanx.security.privacy import NoisySum, PoissonGaussian
from seeded_entropy import seed_noise

sys.path.insert(0, str(Path(__file__).parents[1] / "aggregate"))
from summed_round import CLIENTS, SERVER, clients_of, terms_of

from phalanx.security.aggregate import SumServer

stats = LateModule("scipy.stats")

LENGTH = 300


def summed(plan, values, noises):
    """A round in which each client adds its share of the noise."""
    terms = terms_of(plan.clients, length=plan.length, minimum=plan.minimum, max_weight=plan.max_weight)
    clients, server = clients_of(terms), SumServer(terms, SERVER)
    for client in clients.values():
        server.take_advert(client.join_round(server.invitation))
    adverts = server.close_adverts()
    for client in clients.values():
        server.take_boxes(client.share_secrets(adverts))
    deliveries = server.close_boxes()
    for (name, client), noise in zip(clients.items(), noises, strict=True):
        deposit = client.mask_values(deliveries[name], values[name], noise=noise)
        server.take_deposit(deposit.message, deposit.values)
    deposits = server.close_deposits()
    for client in clients.values():
        server.take_consent(client.sign_consent(deposits))
    consents = server.close_consents()
    for client in clients.values():
        server.take_release(client.release_shares(consents))
    return terms, server.unmask_sum()


def test_the_server_sees_the_sum_with_the_noise_of_all_clients_and_no_more_of_it(monkeypatch):
    seed_noise(monkeypatch, 3)
    plan = NoisySum(4, 3, LENGTH, 1.0)
    values = {one.name: np.full(LENGTH, 0.5 / math.sqrt(LENGTH)) for one in CLIENTS[:4]}
    noises = [plan.draw_noise() for _ in range(4)]

    terms, result = summed(plan, values, noises)

    away = result.mean_values() - 0.5 / math.sqrt(LENGTH)
    expected = sum(noises) * terms.ring_encoding.step_size / 4
    # each client rounds by less than a step; the mean is of float32
    allowed = terms.ring_encoding.step_size + np.spacing(np.abs(result.mean_values()).max())
    assert np.abs(away - expected).max() < allowed
    # four shares of noise, three of which are counted on minus one that may collude
    deviation = math.sqrt(4 * float(plan.noise_variance)) * terms.ring_encoding.step_size / 4
    assert stats.kstest(away / deviation, "norm").pvalue > 0.001


def test_without_noise_the_sum_is_exact_and_tells_whether_a_client_was_there():
    plan = NoisySum(4, 3, LENGTH, 1.0)
    values = {one.name: np.zeros(LENGTH) for one in CLIENTS[:4]}
    values[CLIENTS[0].name][7] = 0.25

    _, result = summed(plan, values, [None] * 4)

    # the attacker wins: one look at the sum, and it knows
    assert np.flatnonzero(np.abs(result.mean_values()) > 1e-6).tolist() == [7]


def test_colluding_clients_and_those_that_may_drop_out_bring_no_noise_that_counts():
    plan = NoisySum(10, 7, LENGTH, 2.0)

    assert plan.num_honest == 7 - 3
    together = math.sqrt(plan.num_honest * float(plan.noise_variance))
    assert together >= 2.0 * plan.norm_bound
    assert NoisySum(10, 9, LENGTH, 2.0).noise_variance < plan.noise_variance


def test_a_sum_without_an_honest_client_or_without_noise_is_refused():
    with pytest.raises(ConfigError, match="has no noise of an honest one"):
        NoisySum(16, 5, LENGTH, 1.0)
    for noise in (0.0, 1e4):
        with pytest.raises(ConfigError, match="expected more than 0, 1000 at most"):
            NoisySum(4, 3, LENGTH, noise)


@pytest.mark.parametrize("noise", [0.1, 1.0, 40.0])
def test_all_values_at_their_bound_and_the_noise_fit_into_the_ring(noise):
    plan = NoisySum(10, 7, LENGTH, noise)

    everything = plan.clients * plan.ring_encoding.max_level + 12 * math.sqrt(plan.clients * float(plan.noise_variance))

    assert everything < 2**31


def test_noise_beside_a_weight_is_refused():
    plan = NoisySum(4, 3, 5, 1.0)
    terms = terms_of(4, max_weight=plan.max_weight)
    clients, server = clients_of(terms), SumServer(terms, SERVER)
    for client in clients.values():
        server.take_advert(client.join_round(server.invitation))
    adverts = server.close_adverts()
    for client in clients.values():
        server.take_boxes(client.share_secrets(adverts))
    name, client = next(iter(clients.items()))
    delivery = server.close_boxes()[name]

    for noise, weight in ((plan.draw_noise(), 2), (plan.draw_noise()[:4], 1), (plan.draw_noise().astype(float), 1)):
        with pytest.raises(AggregationError, match="noise: "):
            client.mask_values(delivery, np.zeros(5), weight, noise)


def test_what_rounds_spend_is_above_the_closed_form_of_the_gaussian_and_not_far():
    plan = NoisySum(10, 7, 1000, 2.0)

    for rounds in (1, 10, 100):
        ours = plan.epsilon_after(rounds, 1e-5)
        gaussian = PoissonGaussian(2.0, 1.0)
        mu = math.sqrt(rounds) / 2.0
        phi = stats.norm.cdf
        # the delta of the continuous Gaussian at our epsilon: our bound may not be below it
        delta = phi(mu / 2 - ours / mu) - math.exp(ours) * phi(-mu / 2 - ours / mu)
        assert delta <= 1e-5
        assert gaussian.noise_multiplier == 2.0
    assert plan.epsilon_after(1, 1e-5) == pytest.approx(2.2, abs=0.2)
    assert plan.rho_after(10) == pytest.approx(10 * plan.rho_after(1))
    assert plan.noise_variance == Fraction(plan.noise_variance.numerator)
