"""The optimizer's state of a stage on many ranks: each tensor of it lies whole at one of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.optimizers import StageOptimizer
from phalanx.pipeline import StepPlan
from phalanx.stage_group.orders import StateSource

Shapes = Mapping[str, tuple[int, ...]]
"""Of whole parameters, by name."""


class StateShards:
    """One rank's tensors of the state; all ranks call the same methods in the same order.

    A tensor is never cut: the update of it has the bits that a plain copy's has, and its digest is that of the whole.

    Attributes:
        optimizer: Moves this rank's parameters, which it has in memory of their own.
    """

    def __init__(self, plan: StepPlan, shapes: Shapes, device: torch.device) -> None:
        self._plan = plan
        self._shapes = shapes
        self._device = device
        self._rank = dist.get_rank()
        self.keepers = keepers_of(shapes, dist.get_world_size())
        mine = [name for name, keeper in self.keepers.items() if keeper == self._rank]
        self._weights = {name: nn.Parameter(torch.zeros(self._shapes[name], device=self._device)) for name in mine}
        self.optimizer = self._make_optimizer(self._weights)

    def own_parameter(self, name: str) -> nn.Parameter | None:
        """This rank's whole parameter of a name; None where another rank keeps it."""
        return self._weights.get(name)

    def load_shards(self, num_steps: int, state: Mapping[str, Tensor] | None) -> None:
        """Take the state that rank 0 has.

        Args:
            state: ``weight/...`` and moments; at rank 0 alone.
        """
        loaded: dict[str, Tensor] = {}
        for name, keeper in self.keepers.items():
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                key = f"{kind}/{name}"
                came = self._to_keeper(None if state is None else state[key], name, keeper)
                if came is not None:
                    loaded[key] = came
        self.optimizer.load_state(loaded, num_steps)

    def update_shards(self, lr: float, clip_coefficient: float, gradients: Mapping[str, Tensor]) -> None:
        """Make one optimizer step, each rank with its own tensors.

        Args:
            clip_coefficient: Number that all gradients are multiplied by.
            gradients: Whole ones, at rank 0 alone.
        """
        came = {name: self._to_keeper(gradients.get(name), name, keeper) for name, keeper in self.keepers.items()}
        received = {name: tensor for name, tensor in came.items() if tensor is not None}
        self.optimizer.step(received, lr, clip_coefficient)

    def collect_state(self, names: Sequence[str], source: StateSource) -> dict[str, Tensor]:
        """Bring tensors of the state to rank 0, on the CPU; other ranks get none.

        Args:
            names: Names such as ``exp_avg/...``.
        """
        state = self.optimizer.undo_state() if source == "snapshot" else self.optimizer.state_tensors()
        tensors = {}
        for key in names:
            name = key.partition("/")[2]
            keeper = self.keepers[name]
            if self._rank == 0:
                tensors[key] = state[key].cpu() if keeper == 0 else self._receive_state(name, keeper).cpu()
            elif self._rank == keeper:
                dist.send(state[key].to(self._device).contiguous(), dst=0)
        return tensors

    def _make_optimizer(self, weights: Mapping[str, nn.Parameter]) -> StageOptimizer:
        return StageOptimizer(weights, self._plan.optimizer, single_rounding=self._plan.guard.classes == "mixed")

    def _to_keeper(self, tensor: Tensor | None, name: str, keeper: int) -> Tensor | None:
        """Hand a tensor from rank 0 to the rank that keeps it."""
        if self._rank == 0 and tensor is not None and keeper > 0:
            dist.send(tensor.detach().to(self._device).contiguous(), dst=keeper)
        if self._rank != keeper:
            return None
        return tensor if keeper == 0 else self._receive_state(name, 0)

    def _receive_state(self, name: str, sender: int) -> Tensor:
        came = torch.empty(self._shapes[name], device=self._device)
        dist.recv(came, src=sender)
        return came


def keepers_of(shapes: Shapes, world: int) -> dict[str, int]:
    """Choose the keeper of each parameter's state, so that all keep about as much; rank 0 comes last."""
    loads = [0] * world
    keepers = {}
    for name in sorted(shapes, key=lambda one: (-torch.Size(shapes[one]).numel(), one)):
        keeper = min(range(world), key=lambda rank: (loads[rank], -rank))
        loads[keeper] += torch.Size(shapes[name]).numel()
        keepers[name] = keeper
    return dict(sorted(keepers.items()))
