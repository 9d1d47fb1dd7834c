"""SCAFFOLD: sites correct their gradients by how their own direction differs from that of all sites."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.federated.algorithms.algorithm import Named
from phalanx.federated.config import ScaffoldConfig

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
        own: Control variate of the site.
        of_all: Control variate of all sites.
        delta: Movement of its weights in the round, before it was scaled to the norm.
        way: Local steps times the learning rate.

    Source: Karimireddy et al. 2020, option II.
    """
    return {name: own[name] - of_all[name] - delta[name] / way for name in own}
