"""Attacks on masked offload: that each of them wins where its guard is off shows what the guard is for."""

from dataclasses import replace

import numpy as np
import pytest

from pad_worlds import StuckPads, aes_pads, new_ledger
from phalanx.errors import WrongProductError
from phalanx.security.mask import MaskedWorker, P, masked_linear
from phalanx.security.mask.freivalds import UnsafeNoChecker
from phalanx.security.mask.ring import centred_residues, subtract_mod_p
from seeded_entropy import bytes_from

ROWS, INNER, COLUMNS = 64, 64, 32
RNG = np.random.default_rng(21)
WEIGHT = RNG.standard_normal((INNER, COLUMNS)).astype(np.float32)
X = RNG.standard_normal((ROWS, INNER)).astype(np.float32)
TRIALS = 40_000


def layer_with(pads):
    layer = masked_linear("layer 0", WEIGHT, ROWS, lambda product: pads)
    worker = MaskedWorker()
    worker.load_matrix(layer.forward.product, layer.forward.weight.values)
    return layer.forward, worker


def send(side, x):
    side.pool.make_pad()
    return side.mask_rows(x)


def bent(answer):
    """What a liar sends: one output of the first token moved by much, and nothing conspicuous about it."""
    values = answer.values.copy()
    values[0, 0] = (int(values[0, 0]) + 2**24) % P
    return replace(answer, values=values)


def test_a_worker_that_bends_one_output_is_found():
    side, worker = layer_with(aes_pads(new_ledger(fresh=bytes_from(1))))
    sent = send(side, X)

    with pytest.raises(WrongProductError):
        side.unmask_answer(sent, bent(worker.answer_request(sent.request)))


def test_without_the_check_a_worker_bends_outputs_as_it_likes():
    side, worker = layer_with(aes_pads(new_ledger(fresh=bytes_from(1))))
    side = replace(side, check=UnsafeNoChecker())
    sent = send(side, X)
    answer = worker.answer_request(sent.request)

    honest, spoilt = side.unmask_answer(sent, answer), side.unmask_answer(sent, bent(answer))

    wanted = 2**24 / (sent.scales[0] * side.weight.scales[0])
    assert spoilt[0, 0] - honest[0, 0] == pytest.approx(wanted, rel=1e-4)
    assert (spoilt[1:] == honest[1:]).all()


def test_what_is_masked_twice_with_one_pad_tells_its_difference():
    side, _ = layer_with(StuckPads())
    first, second = send(side, X), send(side, X[::-1].copy())

    seen = centred_residues(subtract_mod_p(first.request.values, second.request.values))

    # the worker knows neither pad nor scale, and has the difference of two tokens up to their scales
    quantised = np.rint(X * first.scales[:, None]) - np.rint(X[::-1] * second.scales[:, None])
    assert (seen == quantised).all()


def test_with_pads_of_a_ledger_the_same_difference_is_noise():
    side, _ = layer_with(aes_pads(new_ledger(fresh=bytes_from(1))))
    first, second = send(side, X), send(side, X)

    seen = centred_residues(subtract_mod_p(first.request.values, second.request.values)).astype(np.float64)

    # uniform over the ring: mean 0 and standard deviation p / sqrt(12), whatever X is
    assert abs(seen.std() / (P / 12**0.5) - 1) < 0.03
    assert abs(np.corrcoef(seen.ravel(), X.ravel())[0, 1]) < 0.06


def advantage(seen, secret):
    """How much better than a coin a guess of which of two values was masked is, from the sign of what is seen."""
    return abs(2 * float(((seen > np.median(seen)) == secret).mean()) - 1)


def test_a_float_mask_lets_a_worker_guess_what_it_hides_and_a_ring_mask_does_not():
    rng, pads = np.random.default_rng(4), aes_pads(new_ledger(fresh=bytes_from(1)))
    secret = rng.random(TRIALS) < 0.5
    x = np.where(secret, 4.0, -4.0)

    gaussian = x + rng.normal(0.0, 8.0, TRIALS)
    ring = (pads.draw_pad(1, TRIALS).take_values()[0].astype(np.int64) + x.astype(np.int64)) % P

    assert 0.35 < advantage(gaussian, secret) < 0.41
    assert advantage(ring, secret) < 0.02


def test_a_bounded_float_mask_gives_some_values_away_for_certain():
    rng, width = np.random.default_rng(4), 16.0
    x = np.where(rng.random(TRIALS) < 0.5, 4.0, -4.0)

    seen = x + rng.uniform(-width, width, TRIALS)

    certain = np.abs(seen) > width - 4.0
    assert abs(certain.mean() - 4.0 / width) < 0.02
    assert (np.sign(seen[certain]) == np.sign(x[certain])).all()


def test_what_the_worker_sees_does_not_depend_on_what_is_masked():
    side, _ = layer_with(aes_pads(new_ledger(fresh=bytes_from(1))))
    bins = 64
    for x in (np.zeros_like(X), X, np.full_like(X, 1e4)):
        seen = np.concatenate([send(side, x).request.values.ravel() for _ in range(8)])

        counts = np.bincount(seen >> 25, minlength=bins)
        expected = seen.size / bins
        # chi-square of 63 degrees of freedom: mean 63, standard deviation 11.2
        assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * 11.2
