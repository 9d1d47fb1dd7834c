"""Rank 0's copy of a stage: the guard sees whole tensors, and the group does the work."""

import weakref
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from phalanx.pipeline import StageCopy, StageRunner, StepPlan
from phalanx.stage_group.optimizer import GroupOptimizer
from phalanx.stage_group.orders import GroupCommand, Operation, describe_tensor


class GroupRanks(Protocol):
    """The part of a group that a copy needs."""

    @property
    def shares_state(self) -> bool:
        """Whether the ranks keep the optimizer's state together; rank 0 has it alone otherwise."""

    def build_copy(self, plan: StepPlan, stage: int) -> int:
        """Have every rank make its share of a copy; returns the copy's number."""

    def drop_copy(self, copy_id: int) -> None:
        """Note that a copy is no longer used; may be called at any moment."""

    def give_order(self, command: GroupCommand, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Have something done by all ranks."""


class GroupLink:
    """The link between rank 0 and its group for one copy."""

    def __init__(self, plain: StageCopy, group: GroupRanks) -> None:
        self._module = plain.module
        self._group = group
        self._id = group.build_copy(plain.plan, plain.spec.index)
        self._sent: tuple[int, int] | None = None
        self._frozen_sent: int | None = None
        weakref.finalize(self, group.drop_copy, self._id)

    def give_order(self, command: GroupCommand, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Have something done with this copy."""
        return self._group.give_order(command.model_copy(update={"copy_id": self._id}), given)

    def refresh_weights(self, num_steps: int) -> None:
        """Give the ranks the parameters, if these were written since the ranks last had them.

        Args:
            num_steps: Number of finished optimizer steps.
        """
        frozen = {
            name: parameter for name, parameter in self._module.all_parameters().items() if not parameter.requires_grad
        }
        version = sum(parameter._version for parameter in frozen.values())
        if frozen and version != self._frozen_sent:
            self.give_order(GroupCommand(operation="frozen", copy_id=0), frozen)
            self._frozen_sent = version
        if self._weights_version(num_steps) != self._sent:
            self.give_order(GroupCommand(operation="weights", copy_id=0), self._module.trainable_parameters())
            self.are_fresh(num_steps)

    def are_fresh(self, num_steps: int) -> None:
        """The ranks have the parameters as they are."""
        self._sent = self._weights_version(num_steps)

    def _weights_version(self, num_steps: int) -> tuple[int, int]:
        # a write in place raises a tensor's version, but that of torch's fused optimizers does not
        return num_steps, sum(parameter._version for parameter in self._module.trainable_parameters().values())


class GroupCopy(StageCopy):
    """A copy that a group holds in shares, in the place of a plain copy, with its module.

    Weights are whole here, and moments and earlier states are gathered when requested, so digests, upkeep and takeover
    work as for any copy. Ranks receive their slices anew whenever a weight was written since they last worked.
    """

    def __init__(self, plain: StageCopy, group: GroupRanks) -> None:
        link = GroupLink(plain, group)
        shares_state = group.shares_state and plain.optimizer.has_moments
        optimizer = GroupOptimizer(plain, link) if shares_state else plain.optimizer
        super().__init__(plain.plan, plain.spec, plain.module, optimizer)
        self.runner = GroupRunner(self, link)


class GroupRunner(StageRunner):
    """A runner that has the ranks of a group run microbatches through a stage."""

    def __init__(self, copy: StageCopy, link: GroupLink) -> None:
        self.module, self.spec = copy.module, copy.spec
        self._optimizer = copy.optimizer
        self._link = link
        self._is_idle = True

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        return self._perform_order("forward", step, microbatch, x=x)["y"]

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return self._perform_order("backward", step, microbatch, gradient=gradient)["x_gradient"]

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        tensors = self._perform_order("recompute", step, microbatch, x=x, gradient=gradient)
        return tensors["y"], tensors.get("x_gradient")

    def take_gradients(self) -> dict[str, Tensor]:
        return self._link.give_order(GroupCommand(operation="gradients", copy_id=0), {})

    def limit_gradients(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        # ranks compute all of them, and get every trained parameter that was written
        return nullcontext()

    def abandon_step(self) -> None:
        if not self._is_idle:
            self._link.give_order(GroupCommand(operation="abandon", copy_id=0), {})
            self._is_idle = True

    def _perform_order(
        self, operation: Operation, step: int, microbatch: int, **tensors: Tensor | None
    ) -> dict[str, Tensor]:
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._link.refresh_weights(self._optimizer.num_steps)
        self._is_idle = False
        cargo = {name: describe_tensor(tensor) for name, tensor in present.items()}
        order = GroupCommand(operation=operation, copy_id=0, step=step, microbatch=microbatch, cargo=cargo)
        return self._link.give_order(order, present)
