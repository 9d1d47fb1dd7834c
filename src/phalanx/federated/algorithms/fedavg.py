"""FedAvg: the model moves by the mean of the sites' updates."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.federated.algorithms.algorithm import Named
from phalanx.federated.config import FedAvgConfig, FedBuffConfig, FedProxConfig, ScaffoldConfig


class MeanStep:
    """A step of the mean itself.

    Args:
        num_values: Number of the model's values.

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
