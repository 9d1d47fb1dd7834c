"""The noise of rounding in one message, measured on its very inputs where a verdict depends on it."""

import torch
from torch import Tensor

from phalanx.pipeline.stage.float64 import recompute_in
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.tolerance.distance import token_distance
from phalanx.planner.schedules import Direction

PROBES = 4
"""Recomputations in the run's own precision, the first from the inputs as they are."""

MARGIN = 8.0
"""How many times the noise of one kernel path another honest one may show."""

_HALF_UNIT = 2.0**-24


def rounding_noise(
    runner: StageRunner, step: int, microbatch: int, direction: Direction, x: Tensor, gradient: Tensor | None
) -> float:
    """Measure the rounding error of one message.

    A message with numbers that cancel, as input gradients do where the loss has a spike, is rounded hundreds of times
    worse than others; no tolerance fixed beforehand knows which one.

    Args:
        runner: Holds the weights that both sides have signed.
        x: The committed input ``[batch, seq, dim]``.
        gradient: The committed gradient of the output ``[batch, seq, dim]``; None for a forward message.

    Returns:
        The largest `token_distance` from the result in float64 to results in the run's precision, on the inputs
        and on inputs that are off by half a unit in the last place.
    """
    exact = _pick_direction(recompute_in(torch.float64, runner, step, microbatch, x, gradient), direction)
    generator = torch.Generator().manual_seed(step * 2**16 + microbatch)
    noise = 0.0
    for probe in range(PROBES):
        near_x, near_gradient = x, gradient
        if probe:
            # half a unit: about every second number becomes its neighbour
            near_x = _nudge_tensor(x, generator)
            near_gradient = None if gradient is None else _nudge_tensor(gradient, generator)
        rounded = _pick_direction(runner.recompute_microbatch(step, microbatch, near_x, near_gradient), direction)
        noise = max(noise, token_distance(rounded, exact))
    return noise


def _nudge_tensor(tensor: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=tensor.dtype) * 2 - 1
    return (tensor.double() * (1 + _HALF_UNIT * signs)).to(tensor.dtype)


def _pick_direction(found: tuple[Tensor, Tensor | None], direction: Direction) -> Tensor:
    y, x_gradient = found
    return y if direction == "forward" or x_gradient is None else x_gradient
