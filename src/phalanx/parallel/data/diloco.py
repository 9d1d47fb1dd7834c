"""Islands that train apart, and the outer step that joins them.

Source: Douillard et al. 2023 (DiLoCo); Stich 2019 (local SGD); Seide et al. 2014 (what rounding loses is sent later).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.parallel.config import OuterConfig
from phalanx.parallel.data.parameters import RankParameter, local_slice
from phalanx.parallel.groups.int8_blocks import dequantize_blocks, quantize_blocks

MOMENTUM = "outer_momentum"
RESIDUAL = "outer_residual"

_BLOCK = 1024
"""Numbers that share one scale when they are sent as bytes."""


class OuterStep:
    """Nesterov's method over what islands have moved since they were last alike.

    Every rank does this with its own slices, and with the ranks that have the same slices on the other islands; all of
    them come to the same bits.

    Args:
        held: Parameters of this rank, which are alike on all islands now.
        islands: The ranks that have the same slices.
    """

    def __init__(self, held: Sequence[RankParameter], config: OuterConfig, islands: dist.ProcessGroup) -> None:
        self._config = config
        self._islands = islands
        self._parameters = [entry.parameter for entry in held]
        self._anchors = [local_slice(parameter).clone() for parameter in self._parameters]
        self._momenta = self._zero_tensors()
        self._residuals = self._zero_tensors() if config.compression != "none" else []

    def is_due(self, num_steps: int) -> bool:
        """Whether islands are joined after so many finished steps."""
        return num_steps % self._config.every == 0

    @torch.no_grad()
    def step(self) -> None:
        """Join the islands; all ranks call this together, and have the same parameters afterwards."""
        for number, (parameter, anchor) in enumerate(zip(self._parameters, self._anchors, strict=True)):
            gradient = self._mean_movement(anchor - local_slice(parameter), number)
            momentum = local_slice(self._momenta[number]).mul_(self._config.momentum).add_(gradient)
            anchor.sub_(gradient.add_(momentum, alpha=self._config.momentum), alpha=self._config.lr)
            local_slice(parameter).copy_(anchor)

    @torch.no_grad()
    def reset_anchors(self) -> None:
        """Take the parameters as they are, alike on all islands, for the point from which they move."""
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            anchor.copy_(local_slice(parameter))

    def outer_state(self, one: RankParameter, kind: str) -> Tensor:
        """`MOMENTUM` or `RESIDUAL` of a parameter, shared out as the parameter is."""
        number = next(n for n, parameter in enumerate(self._parameters) if parameter is one.parameter)
        return self._momenta[number] if kind == MOMENTUM else self._residuals[number]

    def _zero_tensors(self) -> list[Tensor]:
        return [torch.zeros_like(parameter.detach()) for parameter in self._parameters]

    def _mean_movement(self, moved: Tensor, number: int) -> Tensor:
        if not moved.numel():
            return moved
        if not self._residuals:
            dist.all_reduce(moved, group=self._islands)
            return moved.div_(self._islands.size())
        residual = local_slice(self._residuals[number])
        change = moved + residual
        sent, scales = quantize_blocks(change, _BLOCK)
        total = torch.zeros_like(moved)
        # added in the order of the islands, so that all have the same sum
        for theirs, their_scales in zip(
            _gather_from_all(sent, self._islands), _gather_from_all(scales, self._islands), strict=True
        ):
            total.add_(dequantize_blocks(theirs, their_scales, moved))
        residual.copy_(change.sub_(dequantize_blocks(sent, scales, moved)))
        return total.div_(self._islands.size())


def _gather_from_all(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return parts
