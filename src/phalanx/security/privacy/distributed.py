"""Noise that the clients of a secure sum bring themselves, so that its server never sees a sum without it.

Every client adds its share of the noise to its rounded values, before its masks. What a sum then tells of any one
client (all of its data together) is bounded against the server and the clients that collude with it, for their shares
of the noise are not counted.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError
from phalanx.security.aggregate import RingEncoding, max_colluding
from phalanx.security.privacy.noise import discrete_gaussian

_TAIL = 12
"""Standard deviations of a sum's noise that fit into the ring beside all values; beyond is a chance of 10^-32."""
_MAX_NOISE, _THOUSAND = 1000.0, 1000


@dataclass(frozen=True)
class NoisySum:
    """A sum with noise, as all its clients know it.

    Attributes:
        minimum: Clients that a sum has at least.
        noise_multiplier: Standard deviation of the noise of the honest clients together, over the bound of one
            client's values.

    Raises:
        ConfigError: No client is sure to be honest, or there is no noise, or too much.

    Guarantees:
        With `rounds` sums, an adversary that sees all of them, and the inputs and noise of all clients that may
        collude, learns of any other client no more than `epsilon` says: concentrated differential privacy, where one
        client's values are replaced by zeros.

    Source: Kairouz, Liu and Steinke 2021, theorem 1; Canonne, Kamath and Steinke 2020, proposition 7.
    """

    clients: int
    minimum: int
    length: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        if self.num_honest < 1:
            raise ConfigError(
                f"a sum of {self.minimum} clients, {max_colluding(self.clients)} of which may collude, has no noise "
                "of an honest one; raise the minimum"
            )
        if not 0 < self.noise_multiplier <= _MAX_NOISE:
            raise ConfigError(
                f"noise_multiplier = {self.noise_multiplier}: expected more than 0, {_MAX_NOISE:g} at most"
            )

    @property
    def max_weight(self) -> int:
        """`max_weight` of the terms of the sum, of which every client has the weight 1: the rest is for the noise."""
        deviations = _TAIL * self.noise_multiplier * math.sqrt(self.clients / self.num_honest)
        return 2 + math.ceil(deviations / self.clients)

    @property
    def ring_encoding(self) -> RingEncoding:
        """The encoding of values as integers; the clip does not matter for counting."""
        return RingEncoding(self.clients, 1.0, self.max_weight)

    @property
    def num_honest(self) -> int:
        """Clients that bring noise which no adversary knows, at least."""
        return self.minimum - max_colluding(self.clients)

    @property
    def norm_bound(self) -> float:
        """Norm of a client's integers at most: rounding moves each by less than one."""
        return self.ring_encoding.max_level + math.sqrt(self.length)

    @property
    def noise_variance(self) -> Fraction:
        """The parameter sigma^2 of one client's noise."""
        return Fraction(math.ceil((self.noise_multiplier * self.norm_bound) ** 2 / self.num_honest))

    def rho_after(self, rounds: int) -> float:
        """Return the rho of zero-concentrated privacy of so many sums."""
        # sums of discrete Gaussians are not quite discrete Gaussian
        variance = float(self.noise_variance)
        away = 10 * sum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, self.num_honest))
        ratio = self.norm_bound / math.sqrt(self.num_honest * variance)
        spent = min(math.sqrt(ratio**2 + away * self.length / 2), ratio + away * math.sqrt(self.length))
        return rounds * spent**2 / 2

    def epsilon_after(self, rounds: int, delta: float) -> float:
        """Return the epsilon of so many sums at a delta."""
        return epsilon_of_rho(self.rho_after(rounds), delta)

    def draw_noise(self) -> NDArray[np.int64]:
        """Draw one client's share of the noise; for one sum alone."""
        return discrete_gaussian(self.length, self.noise_variance)


@dataclass(frozen=True)
class NoisyRounds:
    """The noisy sums of a run, a mechanism of its ledger: clients drop out, so a sum may have one of several sizes.

    Attributes:
        fewest: Clients of a cohort at least.
        most: Clients of a cohort at most.
        minimum: Clients that a sum has at least.
        noise_multiplier: Noise multiplier, as in `NoisySum`.

    Raises:
        ConfigError: A sum of one of these sizes has no noise of an honest client.

    Guarantees:
        `epsilon` bounds what any number of sums tells of one client that is in all of them. How cohorts are drawn
        earns nothing: it is known which clients take part.
    """

    min_clients: int
    max_clients: int
    minimum: int
    length: int
    noise_multiplier: float
    rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        for clients in range(self.min_clients, self.max_clients + 1):
            self.noisy_sum(clients)

    def noisy_sum(self, clients: int) -> NoisySum:
        """Return the sum of a cohort of so many."""
        if not self.min_clients <= clients <= self.max_clients:
            raise ConfigError(f"a noisy sum of {clients} clients: expected {self.min_clients} to {self.max_clients}")
        return NoisySum(clients, self.minimum, self.length, self.noise_multiplier)

    def epsilon_after(self, steps: int, delta: float) -> float:
        """Return the epsilon of so many sums, each of the size that tells most."""
        return epsilon_of_rho(steps * self.rho_per_sum, delta) if steps else 0.0

    def affordable_steps(self, epsilon: float, delta: float, at_most: int) -> int:
        """Return how many sums stay within an epsilon, or `at_most` where as many do."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon_after(middle, delta) <= epsilon else (low, middle)
        return low

    def with_noise_for(self, steps: int, epsilon: float, delta: float) -> "NoisyRounds":
        """Return these sums with the least noise, in thousandths, that keeps so many of them within an epsilon."""
        low, high = 0, round(_MAX_NOISE * _THOUSAND)
        if self._with_multiplier(high).epsilon_after(steps, delta) > epsilon:
            raise ConfigError(
                f"federated.privacy.epsilon = {epsilon}: no noise keeps {steps} rounds within it; raise it, or take "
                "fewer rounds"
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle)
                if self._with_multiplier(middle).epsilon_after(steps, delta) <= epsilon
                else (middle, high)
            )
        return self._with_multiplier(high)

    @cached_property
    def rho_per_sum(self) -> float:
        """The rho of one sum in zero-concentrated differential privacy, where the rho of sums add up."""
        return max(self.noisy_sum(clients).rho_after(1) for clients in range(self.min_clients, self.max_clients + 1))

    def _with_multiplier(self, thousandths: int) -> "NoisyRounds":
        return replace(self, noise_multiplier=thousandths / _THOUSAND)


def epsilon_of_rho(rho: float, delta: float) -> float:
    """Return the epsilon of a mechanism with rho-zero-concentrated differential privacy (Canonne et al. 2020)."""
    orders = 1 + np.exp(np.linspace(-6, 12, 4000))
    # proposition 7, solved for epsilon at each order; the least one holds
    epsilons = orders * rho + (math.log(1 / delta) + (orders - 1) * np.log1p(-1 / orders) - np.log(orders)) / (
        orders - 1
    )
    return max(0.0, float(epsilons.min()))
