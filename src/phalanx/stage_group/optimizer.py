"""Rank 0's end of an optimizer with a state that the ranks of a group keep together (ZeRO)."""

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import TrainingError
from phalanx.optimizers import StageOptimizer, expect_state
from phalanx.pipeline import StageCopy
from phalanx.stage_group.orders import GroupCommand, StateSource

_MOMENTS = ("exp_avg", "exp_avg_sq")


class GroupOrders(Protocol):
    """The part of a copy's link to the group that an optimizer needs."""

    def give_order(self, command: GroupCommand, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Have something done with this copy."""

    def refresh_weights(self, num_steps: int) -> None:
        """Give the ranks the parameters, if these were written since."""

    def are_fresh(self, num_steps: int) -> None:
        """Note that the ranks have the parameters as they are."""


class GroupOptimizer(StageOptimizer):
    """An optimizer with whole weights and no moments: those come from the ranks when they are asked for.

    Args:
        plain: The copy that the group stands in for; its state is taken over.
    """

    def __init__(self, plain: StageCopy, link: GroupOrders) -> None:
        super().__init__(plain.module.trainable_parameters(), plain.plan.optimizer, has_moments=False)
        self._link = link
        if plain.step_count > 0:
            self.load_state(plain.optimizer.state_tensors(), plain.step_count)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, clip_coefficient: float) -> None:
        """As `StageOptimizer.step`; each rank makes its part of it."""
        self._ordered_gradients(gradients)
        if not (math.isfinite(lr) and math.isfinite(clip_coefficient)):
            raise TrainingError(f"optimizer: lr={lr}, clip coefficient={clip_coefficient}; both must be finite")
        self._link.refresh_weights(self.num_steps)
        order = GroupCommand(
            operation="update",
            copy_id=0,
            learning_rate=lr,
            clip_coefficient=clip_coefficient,
        )
        self._take_weights(self._link.give_order(order, gradients), self.num_steps + 1)

    def state_tensors(self) -> dict[str, Tensor]:
        """As `StageOptimizer.state_tensors`; weights are the tensors themselves, moments are copies."""
        weights = super().state_tensors()
        names = _with_moments(weights)
        moments = self._collect_moments(tuple(name for name in names if name not in weights))
        return {name: weights[name] if name in weights else moments[name] for name in names}

    def readable_state(self) -> Mapping[str, Tensor]:
        """As `StageOptimizer.readable_state`: each moment comes from its rank when it is asked for."""
        return _DistributedState(super().state_tensors(), self._collect_moments)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        state = super().state_tensors()
        expect_state(
            tensors, {key: state[f"weight/{key.partition('/')[2]}"] for key in _with_moments(state)}, num_steps
        )
        for name, weight in state.items():
            weight.copy_(tensors[name])
        self._forget_other_past(num_steps)
        self._set_num_steps(num_steps)
        self._link.give_order(GroupCommand(operation="load", copy_id=0, step=num_steps), tensors)

    def keep_snapshot(self) -> None:
        self._link.refresh_weights(self.num_steps)
        self._link.give_order(GroupCommand(operation="snapshot", copy_id=0), {})
        self._undo_steps = self.num_steps

    def restore_snapshot(self) -> None:
        state, steps = self.undo_state(), self._undo_steps
        self.load_state(state, steps or 0)

    def undo_state(self) -> dict[str, Tensor]:
        """As `StageOptimizer.undo_state`; copies."""
        if self._undo_steps is None:
            raise TrainingError("optimizer: no snapshot to look at; take one before the step")
        return self._collect_moments(_with_moments(super().state_tensors()), "snapshot")

    @torch.no_grad()
    def _take_weights(self, weights: Mapping[str, Tensor], num_steps: int) -> None:
        state = super().state_tensors()
        for name, weight in weights.items():
            state[f"weight/{name}"].copy_(weight)
        self._set_num_steps(num_steps)
        self._link.are_fresh(num_steps)

    def _collect_moments(self, names: tuple[str, ...], source: StateSource = "present") -> dict[str, Tensor]:
        order = GroupCommand(operation="collect", copy_id=0, names=names, source=source)
        return self._link.give_order(order, {})


class _DistributedState(Mapping[str, Tensor]):
    """A state of which rank 0 has the weights; in the order of `StageOptimizer.state_tensors`."""

    def __init__(self, weights: Mapping[str, Tensor], collect: "CollectTensors") -> None:
        self._weights = weights
        self._collect_moments = collect
        self._names = _with_moments(weights)

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name] if name in self._weights else self._collect_moments((name,))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class CollectTensors(Protocol):
    """A way in which tensors of the state come from the ranks."""

    def __call__(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Bring the named ones to rank 0."""


def _with_moments(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = [name.partition("/")[2] for name in weights]
    return tuple(f"{kind}/{name}" for name in names for kind in ("weight", *_MOMENTS))
