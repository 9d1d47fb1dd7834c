"""FedAvgM: the mean of the sites' updates goes into a momentum."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.federated.algorithms.algorithm import Named
from phalanx.federated.config import FedAvgMConfig


class MomentumStep:
    """``m = beta m + u``, then ``rate * m``.

    Args:
        num_values: Number of the model's values.

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
