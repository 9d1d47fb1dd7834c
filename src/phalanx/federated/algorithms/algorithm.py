"""The parts of an algorithm of federated rounds: a step of the owner, and a rule of the sites."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.federated.config import (
    FedAdamConfig,
    FedAvgConfig,
    FedAvgMConfig,
    FedBuffConfig,
    FedProxConfig,
    ScaffoldConfig,
)


def staleness_weight(rounds_behind: int) -> float:
    """Return what an update that is so many rounds behind counts for.

    Source: Nguyen et al. 2022, ``1 / sqrt(1 + tau)``.
    """
    return 1.0 / math.sqrt(1.0 + rounds_behind)


Named = dict[str, Tensor]
"""Tensors by name."""


class ServerStep(Protocol):
    """The owner's part: how far the model moves by the aggregate of a round."""

    def compute_move(self, update: Tensor) -> Tensor:
        """Return the addition to the weights, ``[values]``, for an aggregate of the sites' updates."""

    def server_state(self) -> Named:
        """State that later steps depend on."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where a state was taken."""


class LocalRule(Protocol):
    """A site's part, during one round."""

    def correct_gradients(self, gradients: Named, weights: Mapping[str, Tensor]) -> None:
        """Change the gradients of one local step, in place."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    Attributes:
        server: Makes the owner's step of the section and the number of values.
        local: Makes a site's rule of the section and the weights at the beginning of the round.
    """

    server: Callable[[Any, int], ServerStep]
    local: Callable[[Any, Mapping[str, Tensor]], LocalRule]
    source: str


class PlainRule:
    """The rule of sites that train as they would alone."""

    def __init__(self, config: object, start: Mapping[str, Tensor]) -> None:
        del config, start

    def correct_gradients(self, gradients: Named, weights: Mapping[str, Tensor]) -> None:
        """Leave them."""


class AdamStep:
    """``rate * m / (sqrt(v) + tau)`` with ``m = b1 m + (1 - b1) u`` and ``v = b2 v + (1 - b2) u^2``, uncorrected.

    Source: Reddi et al. 2021, algorithm 2; v begins at ``tau^2``.
    """

    def __init__(self, config: FedAdamConfig, num_values: int) -> None:
        self._config = config
        self._mean = torch.zeros(num_values)
        self._square = torch.full((num_values,), config.tau**2)

    def compute_move(self, update: Tensor) -> Tensor:
        """As `ServerStep` says."""
        first, second = self._config.betas
        self._mean.lerp_(update, 1 - first)
        self._square.mul_(second).addcmul_(update, update, value=1 - second)
        return self._config.rate * self._mean / (self._square.sqrt() + self._config.tau)

    def server_state(self) -> Named:
        """Both moments."""
        return {"mean": self._mean, "square": self._square}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """As `ServerStep` says."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])


class MeanStep:
    """A step of the mean itself.

    Source: McMahan et al. 2017; with one local step of SGD it is SGD on the union of the sites' batches.
    """

    def __init__(self, config: FedAvgConfig | FedProxConfig | ScaffoldConfig | FedBuffConfig, num_values: int) -> None:
        del num_values
        self._rate = config.rate

    def compute_move(self, update: Tensor) -> Tensor:
        """As `ServerStep` says."""
        return update if self._rate == 1.0 else self._rate * update

    def server_state(self) -> Named:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take nothing."""
        del state


class MomentumStep:
    """``m = beta m + u``, then ``rate * m``.

    Source: Hsu et al. 2019.
    """

    def __init__(self, config: FedAvgMConfig, num_values: int) -> None:
        self._config = config
        self._momentum = torch.zeros(num_values)

    def compute_move(self, update: Tensor) -> Tensor:
        """As `ServerStep` says."""
        self._momentum.mul_(self._config.momentum).add_(update)
        return self._config.rate * self._momentum

    def server_state(self) -> Named:
        """The momentum."""
        return {"momentum": self._momentum}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """As `ServerStep` says."""
        self._momentum.copy_(state["momentum"])


class ProximalRule:
    """The gradient of the proximal term, added to each local gradient.

    Args:
        start: Weights at the beginning of the round; kept.

    Source: Li et al. 2020.
    """

    def __init__(self, config: FedProxConfig, start: Mapping[str, Tensor]) -> None:
        self._mu, self._start = config.mu, start

    def correct_gradients(self, gradients: Named, weights: Mapping[str, Tensor]) -> None:
        """Add ``mu * (w - start)``."""
        for name, gradient in gradients.items():
            gradient.add_(weights[name] - self._start[name], alpha=self._mu)


CONTROL = "control/"
"""Begins the names of control variates beside those of weights, in what goes out and in what comes back."""


class ControlRule:
    """A site's correction ``c - c_i``; the variates are put in by `with_controls`, and zero until then."""

    def __init__(self, config: ScaffoldConfig, start: Mapping[str, Tensor]) -> None:
        del config
        self._correction = {name: torch.zeros_like(tensor) for name, tensor in start.items()}

    def with_controls(self, of_all: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Take the variate of all sites and that of this one, without `CONTROL` in their names."""
        for name, correction in self._correction.items():
            torch.sub(of_all[name], own[name], out=correction)

    def correct_gradients(self, gradients: Named, weights: Mapping[str, Tensor]) -> None:
        """Add the correction."""
        del weights
        for name, gradient in gradients.items():
            gradient.add_(self._correction[name])


def next_control(
    own: Mapping[str, Tensor], of_all: Mapping[str, Tensor], delta: Mapping[str, Tensor], way: float
) -> Named:
    """Return a site's next variate, ``c_i - c - delta / (steps * rate)``.

    Args:
        delta: Movement of its weights in the round, before it was scaled to the norm.
        way: Local steps times the learning rate.

    Source: Karimireddy et al. 2020, option II.
    """
    return {name: own[name] - of_all[name] - delta[name] / way for name in own}
