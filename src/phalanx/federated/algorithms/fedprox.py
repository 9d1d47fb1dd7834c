"""FedProx: a site's loss has ``mu / 2`` times its squared way from the round's beginning as a part."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.federated.algorithms.algorithm import Named
from phalanx.federated.config import FedProxConfig


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
