"""Rank 0's copy of a stage: it has the whole state, and the group does the work."""

import weakref
from typing import Protocol

from torch import Tensor

from phalanx.models import StageModule
from phalanx.pipeline import StageCopy, StageRunner, StepPlan
from phalanx.stage_group.orders import Deed


class Workers(Protocol):
    """What a copy needs of its group."""

    def build(self, plan: StepPlan, stage: int) -> int:
        """Have every rank make its share of a copy; returns the copy's number."""

    def drop(self, copy_id: int) -> None:
        """Note that a copy is no longer used; may be called at any moment."""

    def send_weights(self, copy_id: int, module: StageModule) -> None:
        """Give every rank its slices of these parameters."""

    def perform(
        self, copy_id: int, deed: Deed, step: int, microbatch: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Have a microbatch done by all ranks."""

    def gradients(self, copy_id: int) -> dict[str, Tensor]:
        """Collect whole weight gradients."""


class GroupCopy(StageCopy):
    """Stands in for a plain copy, with its module and its optimizer.

    Weights and moments are whole here, so digests, upkeep and takeover are those of any copy. Ranks get their
    slices anew whenever a weight was written since they last worked.
    """

    def __init__(self, plain: StageCopy, group: Workers) -> None:
        super().__init__(plain.plan, plain.spec, plain.module, plain.optimizer)
        self.history = plain.history
        self._group = group
        self.runner = GroupRunner(plain, group)

    def past(self, step: int) -> StageCopy:
        """As any copy's, computed by the group too: what it is compared with was."""
        found = super().past(step)
        return found if found is self else GroupCopy(found, self._group)


class GroupRunner(StageRunner):
    """Has the ranks of a group run microbatches through a stage."""

    def __init__(self, plain: StageCopy, group: Workers) -> None:
        self.module, self.spec = plain.module, plain.spec
        self._group = group
        self._optimizer = plain.optimizer
        self._id = group.build(plain.plan, plain.spec.index)
        self._sent: tuple[int, int] | None = None
        self._is_idle = True
        weakref.finalize(self, group.drop, self._id)

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """As `StageRunner.forward`."""
        (y,) = self._perform("forward", step, microbatch, x)
        return _present(y)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As `StageRunner.backward`."""
        (x_gradient,) = self._perform("backward", step, microbatch, gradient)
        return x_gradient

    def recompute(self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As `StageRunner.recompute`."""
        y, x_gradient = self._perform("recompute", step, microbatch, x, gradient)
        return _present(y), x_gradient

    def gradients(self) -> dict[str, Tensor]:
        """As `StageRunner.gradients`."""
        return self._group.gradients(self._id)

    def abandon(self) -> None:
        """As `StageRunner.abandon`."""
        if not self._is_idle:
            self._group.perform(self._id, "abandon", 0, 0)
            self._is_idle = True

    def _perform(self, deed: Deed, step: int, microbatch: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        # a write in place raises a tensor's version, but that of torch's fused optimizers does not
        writes = sum(parameter._version for parameter in self.module.all_parameters().values())
        version = (self._optimizer.num_steps, writes)
        if version != self._sent:
            self._group.send_weights(self._id, self.module)
            self._sent = version
        self._is_idle = False
        return self._group.perform(self._id, deed, step, microbatch, *tensors)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("a stage returned no tensor")
    return tensor
