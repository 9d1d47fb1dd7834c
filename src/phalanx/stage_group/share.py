"""One rank's share of a copy of a stage: its slices of the matrices, and its part of every deed."""

from typing import cast

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.models import StageModule
from phalanx.parallel.data.parameters import RankParameter, fill, held_parameters, whole
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.part import StagePart
from phalanx.pipeline import StageCopy, StageRunner, StepPlan
from phalanx.stage_group.orders import GroupCommand


class SlicedStage(StagePart):
    """A stage's slices, with the parameters that a `StageRunner` asks for."""

    @property
    def shared_head(self) -> None:
        """Middle stages have no head."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """This rank's slices of what the optimizer moves."""
        return self.stage.trainable()


class Share:
    """What every rank of a group has of one copy; all ranks call the same methods in the same order.

    Args:
        plan: The run's.
        stage: Which stage.
        domain: This rank's place; tensor parallel ranks alone.
    """

    def __init__(self, plan: StepPlan, stage: int, domain: Domain) -> None:
        copy = StageCopy.empty(plan, stage, has_moments=False)
        self._domain = domain
        part = SlicedStage(copy.module, domain)
        self._held = held_parameters(part, domain)
        self._runner = StageRunner(
            cast("StageModule", part),  # it has all that a runner calls
            copy.spec,
            seed=plan.seed,
            precision=plan.precision,
            device=str(domain.device),
            lanes=plan.lanes,
        )

    def perform(self, order: GroupCommand, cargo: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Do this rank's part of a deed with a microbatch; the results are the same on every rank."""
        first = cargo[0] if cargo else None
        match order.deed:
            case "forward" if first is not None:
                return (self._runner.forward(order.step, order.microbatch, first),)
            case "backward":
                return (self._runner.backward(order.step, order.microbatch, first),)
            case "recompute" if first is not None:
                return self._runner.recompute(order.step, order.microbatch, first, cargo[1])
            case _:
                self._runner.abandon()
                return ()

    def fill(self, weights: StageModule | None) -> None:
        """Take this rank's slices of rank 0's whole parameters."""
        given = {} if weights is None else weights.all_parameters()
        for one in self._held:
            full = self._room_for(one)
            if weights is not None:
                full.copy_(given[one.name].detach())
            dist.broadcast(full, src=0)
            fill(one, one.parameter, full, self._domain)

    def gradients(self) -> dict[str, Tensor]:
        """Whole weight gradients, joined from all ranks, by name."""
        slices = self._runner.gradients()
        return {one.name: whole(one, slices[one.name], self._domain) for one in self._held if one.name in slices}

    def _room_for(self, one: RankParameter) -> Tensor:
        shape = list(one.parameter.shape)
        if one.split is not None:
            shape[one.split.dim] *= self._domain.config.tp
        return torch.empty(shape, dtype=one.parameter.dtype, device=self._domain.device)
