"""The parts of an algorithm of federated rounds: a step of the owner, and a rule of the sites."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Named = dict[str, Tensor]
"""Tensors by name."""


class ServerStep(Protocol):
    """The owner's part: how far the model moves by the aggregate of a round."""

    def compute_move(self, update: Tensor) -> Tensor:
        """Return the addition to the weights, ``[values]``, for an aggregate of the sites' updates."""
        ...

    def server_state(self) -> Named:
        """State that later steps depend on."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where a state was taken."""
        ...


class LocalRule(Protocol):
    """A site's part, during one round."""

    def correct_gradients(self, gradients: Named, weights: Mapping[str, Tensor]) -> None:
        """Change the gradients of one local step, in place."""
        ...


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
