"""FedAdam: the mean of the sites' updates is a gradient for Adam."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.federated.algorithms.algorithm import Named
from phalanx.federated.config import FedAdamConfig


class AdamStep:
    """``rate * m / (sqrt(v) + tau)`` with ``m = b1 m + (1 - b1) u`` and ``v = b2 v + (1 - b2) u^2``, uncorrected.

    Args:
        num_values: Number of the model's values.

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
