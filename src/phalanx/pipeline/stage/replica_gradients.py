"""Weight gradients of two lanes of microbatches, kept apart while they add up and added once at the end."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class LaneGradients:
    """The gradients of each lane, apart; autograd adds them up in `parameter.grad`.

    Guarantees:
        What `take` returns has the same bits whether one process ran both lanes, in whatever turns, or two
        processes ran one each and their results were put together by `add_lanes`.
    """

    def __init__(self) -> None:
        self._lane: int | None = None
        self._aside: dict[int, dict[str, Tensor | None]] = {}

    def turn_to(self, lane: int, parameters: Mapping[str, Tensor]) -> None:
        """Let the gradients that come next count for this lane."""
        if self._lane is not None and lane != self._lane:
            self._aside[self._lane] = {name: parameter.grad for name, parameter in parameters.items()}
            found = self._aside.pop(lane, {})
            for name, parameter in parameters.items():
                parameter.grad = found.get(name)
        self._lane = lane

    def take(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum of the lanes that were run since the last call, by name; a parameter that got none has zeros."""
        present = {name: parameter.grad for name, parameter in parameters.items()}
        lanes = {**self._aside, self._lane or 0: present}
        self.clear(parameters)
        return add_lanes([_filled(lanes[lane], parameters) for lane in sorted(lanes)])

    def clear(self, parameters: Mapping[str, Tensor]) -> None:
        """Forget everything."""
        self._lane = None
        self._aside.clear()
        for parameter in parameters.values():
            parameter.grad = None


def add_lanes(lanes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add weight gradients of lanes, by name; one alone is returned as it is."""
    first, *others = lanes
    total = dict(first)
    for lane in others:
        total = {name: total[name] + lane[name] for name in total}
    return total


def _filled(lane: Mapping[str, Tensor | None], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: lane.get(name) for name in parameters}
    return {
        name: torch.zeros_like(parameters[name]) if gradient is None else gradient for name, gradient in found.items()
    }
