"""Integer noise of the exact discrete Gaussian distribution, by integer arithmetic alone.

The chance of x is proportional to ``exp(-x^2 / (2 sigma^2))``. Each comparison is with fresh random bits, so no value
depends on how real numbers are rounded: what the accountant assumes of the distribution is true of it.

Source: Canonne, Kamath and Steinke 2020, algorithms 1 to 3. One thing is ours: values are drawn many at a time, and
those that are refused are drawn again.
"""

import math
import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Below = Callable[[int], int]
"""Draws a uniform integer from 0 to below its argument."""


def discrete_gaussian(count: int, variance: Fraction, below: Below = secrets.randbelow) -> NDArray[np.int64]:
    """Draw integers of a discrete Gaussian.

    Args:
        count: How many.
        variance: The parameter sigma^2, above 0; the variance itself is at most that.
        below: Draws uniform integers; another one than the system's generator is for test vectors.

    Guarantees:
        Each value has exactly the distribution, if `below` is uniform. Time depends on what is drawn.
    """
    if variance <= 0:
        raise ValueError(f"variance {variance}: expected more than 0")
    # floor(sigma) + 1, without a root of a rational being rounded
    scale = math.isqrt(math.floor(variance)) + 1
    return np.array([_gaussian(variance, scale, below) for _ in range(count)], np.int64)


def _gaussian(variance: Fraction, scale: int, below: Below) -> int:
    while True:
        value = _laplace(scale, below)
        miss = abs(value) - variance / scale
        if _bernoulli_exp(miss * miss / (2 * variance), below):
            return value


def _laplace(scale: int, below: Below) -> int:
    """Draw an integer x with a chance proportional to ``exp(-|x| / scale)``."""
    while True:
        rest = below(scale)
        if not _bernoulli_exp(Fraction(rest, scale), below):
            continue
        whole = 0
        while _bernoulli_exp(Fraction(1), below):
            whole += 1
        size, is_negative = rest + scale * whole, below(2) == 1
        # zero has one sign only
        if size or not is_negative:
            return -size if is_negative else size


def _bernoulli_exp(gamma: Fraction, below: Below) -> bool:
    """Return True with the chance ``exp(-gamma)``."""
    while gamma > 1:
        if not _bernoulli_exp(Fraction(1), below):
            return False
        gamma -= 1
    count = 1
    while below(gamma.denominator * count) < gamma.numerator:
        count += 1
    return count % 2 == 1
