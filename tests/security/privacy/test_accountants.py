"""What steps spend: two accountants agree, no bound is below the truth, and noise is found for a budget."""

import json
import math
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.security.privacy import (
    CappedPoissonGaussian,
    PoissonGaussian,
    check_rate,
    max_mean_rows,
    min_noise_multiplier,
)
from phalanx.security.privacy.capped import spill_chance

pytest.importorskip("opacus", reason="needs the extra `dp`")

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "privacy" / "pld.json").read_text())["cases"]


@pytest.mark.quick_cases("2.0-0.1-200", "1.0-0.01-1000", "4.0-1.0-50")
@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"{case['noise_multiplier']}-{case['rate']}-{case['steps']}")
def test_the_second_accountant_comes_to_the_same_within_a_hundredth(case):
    found = PoissonGaussian(case["noise_multiplier"], case["rate"]).epsilon_after(case["steps"], case["delta"])

    assert found == pytest.approx(case["epsilon"], rel=0.01)


def exact_delta(epsilon, noise, steps):
    """Of so many Gaussian mechanisms without sampling, in closed form (Balle and Wang 2018)."""
    mu = math.sqrt(steps) / noise
    phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 5), (4.0, 100)])
def test_without_sampling_the_bound_is_the_closed_form_and_not_below_it(noise, steps):
    epsilon = PoissonGaussian(noise, 1.0).epsilon_after(steps, 1e-5)

    assert exact_delta(epsilon, noise, steps) <= 1e-5
    assert exact_delta(epsilon - 0.05, noise, steps) > 1e-5


def test_nothing_is_spent_by_no_step_and_more_by_more():
    step = PoissonGaussian(1.0, 0.01)

    spent = [step.epsilon_after(steps, 1e-5) for steps in (0, 1, 10, 100)]

    assert spent[0] == 0.0
    assert spent == sorted(spent)


def test_the_noise_for_a_budget_is_enough_and_hardly_more():
    noise = min_noise_multiplier(3.0, 1e-5, 0.02, 200)

    assert PoissonGaussian(noise, 0.02).epsilon_after(200, 1e-5) <= 3.0
    assert PoissonGaussian(noise * 0.99, 0.02).epsilon_after(200, 1e-5) > 3.0


def test_as_many_steps_are_affordable_as_stay_within_the_budget():
    step = PoissonGaussian(1.0, 0.02)

    count = step.affordable_steps(3.0, 1e-5, at_most=1000)

    assert step.epsilon_after(count, 1e-5) <= 3.0 < step.epsilon_after(count + 1, 1e-5)
    assert step.affordable_steps(3.0, 1e-5, at_most=7) == 7
    assert step.affordable_steps(1e-3, 1e-5, at_most=7) == 0


def test_a_rate_is_told_only_where_delta_says_something():
    assert check_rate(1000, 50, 1e-5) == 0.05
    with pytest.raises(ConfigError, match="publishes one row at random"):
        check_rate(1000, 50, 1e-3)
    with pytest.raises(ConfigError, match="50 rows are drawn in the mean, and there are 40"):
        check_rate(40, 50, 1e-5)


def test_rows_that_a_step_has_no_room_for_are_paid_for():
    step = CappedPoissonGaussian(1.0, 0.02, rows=1000, places=64)

    found = step.epsilon_after(100, 1e-5)

    # one hundredth of delta is kept for samples that do not fit
    assert found == pytest.approx(PoissonGaussian(1.0, 0.02).epsilon_after(100, 0.99e-5))
    assert step.affordable_steps(found, 1e-5, at_most=1000) == 100
    # 20 rows in the mean and room for 24: in some step of a hundred they do not fit
    assert CappedPoissonGaussian(1.0, 0.02, rows=1000, places=24).epsilon_after(100, 1e-5) == math.inf


@pytest.mark.parametrize(("rows", "rate", "places"), [(1000, 0.02, 24), (1000, 0.02, 64), (60, 0.25, 30), (9, 0.5, 8)])
def test_the_chance_of_a_sample_that_does_not_fit_is_bounded_closely(rows, rate, places):
    found = spill_chance(rows, rate, places)

    exact = math.fsum(
        math.comb(rows, count) * rate**count * (1 - rate) ** (rows - count) for count in range(places + 1, rows + 1)
    )
    assert exact * (1 - 1e-9) <= found <= 1.3 * exact


def test_as_many_rows_are_drawn_as_there_is_room_for():
    mean = max_mean_rows(1000, 64, 100, epsilon=8.0, delta=1e-5)

    paid = [spill_chance(1000, rows / 1000, 64) * 100 * (1 + math.exp(8.0)) <= 1e-7 for rows in (mean, mean + 1)]
    assert paid == [True, False]
    assert max_mean_rows(50, 50, 100, epsilon=8.0, delta=1e-5) == 50
    assert max_mean_rows(1000, 2, 100, epsilon=8.0, delta=1e-9) == 0
