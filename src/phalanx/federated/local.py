"""The interface between a site's rounds and what trains there: weights go in, an update and its weight come out.

What is to happen to an update before it leaves a site (noise, another clipping) is a `LocalTrainer` around another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from phalanx.federated.algorithms import LocalRule, Named


@dataclass(frozen=True)
class LocalUpdate:
    """What a site has trained in one round.

    Attributes:
        delta: What its weights have moved by, by name.
        samples: Training sequences that the site has: its weight, where sites do not count the same.
        loss: Mean over the targets of the round, in nats, as it was before each step.
        num_targets: Of the round.
        steps: Local steps.
    """

    delta: Named
    samples: int
    loss: float
    num_targets: int
    steps: int


@dataclass(frozen=True)
class SiteScores:
    """What a site's own held-out rows say of a model.

    Attributes:
        loss: Summed, in nats.
        num_targets: How many there were.
        classes: For each class texts of it, texts that were taken for it, and right ones; empty of no classification.
    """

    loss: float
    num_targets: int
    classes: tuple[tuple[int, int, int], ...] = ()


class LocalTrainer(Protocol):
    """What trains at a site, with the model in memory from round to round."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor that is trained."""
        ...

    def train(self, number: int, start: Mapping[str, Tensor], rate: float, rule: LocalRule) -> LocalUpdate:
        """Train one round; the same arguments give the same update.

        Args:
            number: Of the round, from 1.
            start: Weights at its beginning.
            rate: Learning rate.
            rule: Corrects gradients.

        Raises:
            FailedBatchError: Loss or gradient is not finite.
        """
        ...

    def measure(self, weights: Mapping[str, Tensor]) -> SiteScores:
        """Measure weights on the site's own held-out rows."""
        ...
