"""What steps of a Gaussian mechanism on Poisson samples spend, by the accountant PRV of Opacus.

An upper bound by Gopi et al. 2021. A second one, PLD of dp-accounting, is compared with it in tests. Opacus's `gdp` is
an approximation that can lie below the truth, and is not used.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import ConfigError

_LARGEST_NOISE, _LEAST_NOISE = 1e4, 0.3
_CLOSE = 1e-3


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

    def epsilon(self, steps: int, delta: float) -> float:
        """Return the epsilon that so many steps spend at a delta; an upper bound."""
        if steps == 0:
            return 0.0
        accountant = _accountant()
        accountant.history = [(self.noise_multiplier, self.rate, steps)]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # at a rate of 1 its formula passes through log 0, and comes out right
            warnings.simplefilter("ignore", RuntimeWarning)
            return float(accountant.get_epsilon(delta))

    def affordable(self, epsilon: float, delta: float, at_most: int) -> int:
        """Return how many steps stay within an epsilon, or `at_most` where as many do."""
        if self.epsilon(at_most, delta) <= epsilon:
            return at_most
        low, high = 0, at_most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle, delta) <= epsilon else (low, middle)
        return low


def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the least noise multiplier, to a thousandth, with which so many steps stay within an epsilon.

    Raises:
        ConfigError: No noise is enough.
    """
    low, high = 0.0, _LEAST_NOISE
    while PoissonGaussian(high, rate).epsilon(steps, delta) > epsilon:
        low, high = high, 2 * high
        if high > _LARGEST_NOISE:
            raise ConfigError(
                f"privacy.epsilon = {epsilon}: no noise keeps {steps} steps within it; raise it, or take fewer steps"
            )
    # a noise of less is not accounted well, and never asked for
    while low and high - low > _CLOSE * high:
        middle = (low + high) / 2
        is_enough = PoissonGaussian(middle, rate).epsilon(steps, delta) <= epsilon
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def check_rate(rows: int, batch_size: int, delta: float) -> float:
    """Return the chance of a row to be in a step's sample.

    Args:
        rows: Training rows.
        batch_size: How many are drawn in the mean.
        delta: Of the run.

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


def _accountant() -> Any:
    try:
        from opacus.accountants import PRVAccountant  # noqa: PLC0415 - it imports torch
    except ImportError as exc:
        raise ConfigError(
            "[privacy] needs opacus, which is not installed; install phalanx-train[dp], or remove the section"
        ) from exc
    return PRVAccountant()
