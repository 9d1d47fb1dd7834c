"""Epsilon of steps of a Gaussian mechanism on Poisson samples, by the accountant PRV of Opacus.

An upper bound by Gopi et al. 2021. A second one, PLD of dp-accounting, is compared with it in tests. Opacus's `gdp` is
an approximation that can lie below the truth, and is not used.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigError

MIN_NOISE, _LARGEST_NOISE = 0.3, 1e4
_CLOSE, _NEAR = 1e-3, 1.1
_FAR, _LARGEST_EXPONENT = -30.0, 30.0


@dataclass(frozen=True)
class PoissonGaussian:
    """One step's mechanism: the sum of a Poisson sample's clipped gradients, with Gaussian noise.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the bound of one row's gradient.
        rate: Chance of each row to be in the sample; 1 where nothing is known of how rows are drawn.

    Guarantees:
        `epsilon` bounds what any number of such steps tells of whether one row was there, to an adversary that sees
        all weights of all steps. It holds only where samples are drawn independently and remain secret.
    """

    noise_multiplier: float
    rate: float

    def epsilon_after(self, steps: int, delta: float) -> float:
        """Return the epsilon that so many steps spend at a delta; an upper bound."""
        if steps == 0:
            return 0.0
        if self.rate == 1:
            return _epsilon_of_normal(math.sqrt(steps) / self.noise_multiplier, delta)
        accountant = _load_accountant()
        accountant.history = [(self.noise_multiplier, self.rate, steps)]
        with warnings.catch_warnings():
            # the orders of a bound that it begins with could be more, which would save memory alone
            warnings.filterwarnings("ignore", message="Optimal order is the")
            return float(accountant.get_epsilon(delta))

    def rough_epsilon(self, steps: int, delta: float) -> float:
        """Return about the epsilon of so many steps, by the central limit: never to be quoted, it may be too low.

        Source: Bu et al. 2020.
        """
        exponent = min(self.noise_multiplier**-2, _LARGEST_EXPONENT)
        return _epsilon_of_normal(self.rate * math.sqrt(steps * math.expm1(exponent)), delta)

    def affordable_steps(self, epsilon: float, delta: float, at_most: int) -> int:
        """Return how many steps stay within an epsilon, or `at_most` where as many do."""

        def is_within(steps: int) -> bool:
            # far beyond the budget the accountant takes much memory to say so
            return self.rough_epsilon(steps, delta) <= 2 * epsilon and self.epsilon_after(steps, delta) <= epsilon

        if is_within(at_most):
            return at_most
        low, high = 0, at_most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_within(middle) else (low, middle)
        return low


def min_noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the least noise multiplier, to a thousandth, with which so many steps stay within an epsilon."""

    def is_enough(noise: float) -> bool:
        return PoissonGaussian(noise, rate).epsilon_after(steps, delta) <= epsilon

    low, high = MIN_NOISE, _LARGEST_NOISE
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        is_low = PoissonGaussian(middle, rate).rough_epsilon(steps, delta) > epsilon
        low, high = (middle, high) if is_low else (low, middle)
    while not is_enough(high):
        low, high = high, high * _NEAR
        if high > _LARGEST_NOISE:
            raise ConfigError(
                f"privacy.epsilon = {epsilon}: no noise keeps {steps} steps within it; raise it, or take fewer steps"
            )
    low = max(MIN_NOISE, high / _NEAR)
    while low > MIN_NOISE and is_enough(low):
        low, high = max(MIN_NOISE, low / _NEAR), low
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def check_rate(rows: int, batch_size: int, delta: float) -> float:
    """Return the chance of a row to be in a step's sample.

    Raises:
        ConfigError: There are fewer rows than a batch has, or delta says nothing of so many rows.
    """
    if batch_size > rows:
        raise ConfigError(f"train.batch_size = {batch_size} rows are drawn in the mean, and there are {rows}; lower it")
    if delta * rows >= 1:
        raise ConfigError(
            f"privacy.delta = {delta} with {rows} training rows: a program that publishes one row at random keeps "
            f"within it; expected less than {1 / rows:.1e}, a tenth of that or less is usual"
        )
    return batch_size / rows


def _epsilon_of_normal(mu: float, delta: float) -> float:
    """Return the epsilon of one Gaussian mechanism with noise 1 and sensitivity mu, in closed form, rounded up.

    Source: Balle and Wang 2018, theorem 8.
    """

    def spent(epsilon: float) -> float:
        second = -mu / 2 - epsilon / mu
        # the product of a huge and a tiny number, by their logarithms
        return _normal_cdf(mu / 2 - epsilon / mu) - math.exp(min(epsilon + _log_normal(second), 0.0))

    low, high = 0.0, 1.0
    while spent(high) > delta:
        low, high = high, 2 * high
    while high - low > _CLOSE**2 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _log_normal(x: float) -> float:
    if x > _FAR:
        return math.log(_normal_cdf(x))
    # Mills' ratio from below: what is subtracted is not too much
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / (x * x))


def _load_accountant() -> Any:
    try:
        from opacus.accountants import PRVAccountant  # noqa: PLC0415 - it imports torch
    except ImportError as exc:
        raise ConfigError(
            "[privacy] needs opacus, which is not installed; install phalanx-train[dp], or remove the section"
        ) from exc
    return PRVAccountant()
