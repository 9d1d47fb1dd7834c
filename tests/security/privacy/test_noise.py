"""Noise and draws: the distributions that the accountants assume, from streams that cannot be foreseen."""

import math
from fractions import Fraction

import numpy as np
import pytest

from late_imports import LateModule
from phalanx.security.privacy import SecureStream, discrete_gaussian, gaussian_noise, poisson_sample
from phalanx.security.privacy.noise import _bernoulli_exp, _draw_laplace
from seeded_entropy import below_from

stats = LateModule("scipy.stats")

KEY = bytes(range(32))


def test_gaussian_noise_is_normal_with_its_deviation():
    noise = gaussian_noise(SecureStream(KEY), 60_000, 2.5)

    assert noise.dtype == np.float32
    assert stats.kstest(noise / 2.5, "norm").pvalue > 0.01
    assert stats.kurtosis(noise) == pytest.approx(0.0, abs=0.06)
    # chunks do not repeat each other
    assert abs(np.corrcoef(noise[:20_000], noise[32_768:52_768])[0, 1]) < 0.02


def test_another_seed_gives_other_noise_and_the_same_one_the_same():
    one, again, other = (gaussian_noise(SecureStream(seed), 1000, 1.0) for seed in (KEY, KEY, KEY[::-1]))

    assert (one == again).all()
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(500, 7)])
@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_discrete_noise_has_the_exact_distribution(count, variance):
    drawn = discrete_gaussian(count, variance, below_from(5))

    edge = int(3 * math.sqrt(variance)) + 1
    weights = {x: math.exp(-x * x / (2 * float(variance))) for x in range(-40 * edge, 40 * edge + 1)}
    total = sum(weights.values())
    # values beyond three deviations are one class
    inner = [x for x in range(-edge, edge + 1) if weights[x] / total > 2e-3]
    expected = [count * weights[x] / total for x in inner]
    found = [int((drawn == x).sum()) for x in inner]
    rest = count - sum(expected)
    if rest > 5:
        expected.append(rest)
        found.append(count - sum(found))
    else:
        expected = [one * sum(found) / sum(expected) for one in expected]
    assert stats.chisquare(found, expected).pvalue > 0.001


def test_the_chance_of_the_smallest_step_of_the_sampler_is_exact():
    drawn = sum(_bernoulli_exp(Fraction(7, 4), below_from(seed)) for seed in range(4000))

    assert drawn / 4000 == pytest.approx(math.exp(-1.75), abs=0.02)


def test_the_draws_of_which_some_are_kept_fall_off_as_their_scale_says():
    below = below_from(11)

    odd = sum(_draw_laplace(2, below) % 2 for _ in range(3000))

    # of chances in proportion to exp(-|x| / 2)
    step = math.exp(-0.5)
    assert odd / 3000 == pytest.approx(2 * step / (1 + step) ** 2, abs=0.02)


def test_large_noise_fits_the_normal_distribution_and_none_is_refused():
    drawn = discrete_gaussian(2000, Fraction(10**14), below_from(9))

    assert stats.kstest(drawn / 1e7, "norm").pvalue > 0.01
    with pytest.raises(ValueError, match="expected more than 0"):
        discrete_gaussian(1, Fraction(0))


def test_each_row_is_drawn_with_its_chance_by_itself():
    rows, batch, draws = 400, 60, 400
    taken = np.zeros((draws, rows))
    for number in range(draws):
        taken[number, poisson_sample(KEY, number, rows, batch)] = 1

    sizes = taken.sum(1)
    # a fixed size would have no variance; independent rows have that of a binomial
    assert sizes.mean() == pytest.approx(60, abs=1.5)
    assert sizes.var() == pytest.approx(rows * 0.15 * 0.85, rel=0.25)
    assert taken.mean(0).max() < 0.25
    assert abs(np.corrcoef(taken[:, 0], taken[:, 1])[0, 1]) < 0.2


def test_a_draw_is_a_function_of_key_and_number_alone():
    one = poisson_sample(KEY, 7, 1000, 100)

    assert (one == poisson_sample(KEY, 7, 1000, 100)).all()
    assert len(set(one) & set(poisson_sample(KEY, 8, 1000, 100))) < 30
    assert len(set(one) & set(poisson_sample(KEY[::-1], 7, 1000, 100))) < 30
    assert (poisson_sample(KEY, 7, 5, 5) == np.arange(5)).all()
    assert any(len(poisson_sample(KEY, number, 100, 1)) == 0 for number in range(20))
