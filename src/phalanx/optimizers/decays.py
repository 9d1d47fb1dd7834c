"""The table of learning-rate schedules: what follows the warm-up. To add one: a line here."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decay:
    """The way in which a learning rate goes down from its peak.

    Attributes:
        share: Of the way from the least rate to the peak, at a progress from 0 to 1; None: the rate stays at its peak.
        is_late: Whether the rate stays at its peak until the last `decay_share` of the run's steps.
    """

    share: Callable[[float], float] | None
    is_late: bool = False


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


DECAYS: dict[str, Decay] = {
    "constant": Decay(None),
    "linear": Decay(_linear),
    "cosine": Decay(_cosine),
    "wsd": Decay(_linear, is_late=True),
}
"""By the name in a run file.

Source: Loshchilov and Hutter 2017 (cosine annealing, one period); Hu et al. 2024 (warm-up, stable, decay).
"""
