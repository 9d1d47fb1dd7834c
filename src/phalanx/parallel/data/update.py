"""The optimizer of one rank, its state by name, and the scale of an fp16 loss."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.optimizers import OptimizerConfig, moment_shapes, torch_optimizer
from phalanx.parallel.config import SHARED_GRADIENTS
from phalanx.parallel.data.parameters import RankParameter, local_slice
from phalanx.parallel.groups.mesh import Domain
from phalanx.planner.model.optimizers import OPTIMIZERS, is_in_bytes

_OPTIMIZER_STATE_ALONE = 1
_STEP = "step"


class RankOptimizer:
    """torch's optimizer over one rank's parameters; with ZeRO 1, over its share of them."""

    def __init__(self, held: Sequence[RankParameter], config: OptimizerConfig, domain: Domain) -> None:
        self._config = config
        self._domain = domain
        parameters = [entry.parameter for entry in held]
        groups = [
            {"params": [p for p in parameters if (p.ndim >= 2) == is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        kind, options = torch_optimizer(config)
        fused = OPTIMIZERS[config.kind].fused
        if fused != "never":
            options |= {"fused": fused == "always" or domain.config.zero < SHARED_GRADIENTS}
        self._zero: Any = None
        if domain.config.zero == _OPTIMIZER_STATE_ALONE:
            self._zero = _sharing_optimizer()(groups, kind, process_group=domain.copies, **options)
        self._optimizer: torch.optim.Optimizer = kind(groups, **options) if self._zero is None else self._zero
        self._parameters = parameters
        # DDP's gradients are parts of the buffers that it exchanges
        self._keeps_gradients = domain.config.num_copies > 1 and domain.config.zero <= _OPTIMIZER_STATE_ALONE

    @torch.no_grad()
    def step(self, lr: float, clip_coefficient: float) -> None:
        """Make one step with the gradients that are in the parameters, and clear them."""
        if clip_coefficient != 1.0:
            torch._foreach_mul_([local_slice(p.grad) for p in self._parameters if p.grad is not None], clip_coefficient)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Forget gradients."""
        if self._keeps_gradients:
            torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
            return
        for parameter in self._parameters:
            parameter.grad = None

    def gather_moment(self, one: RankParameter, name: str) -> Tensor:
        """Return the state of a parameter; with ZeRO 1 all copies call this together."""
        state = self._inner_state.get(one.parameter, {}).get(name)
        value: Tensor = self._zero_moment(one, name) if state is None else state
        if self._zero is None:
            return value
        # one copy has it and the others have zeros
        total = value.clone()
        dist.all_reduce(total, group=self._domain.copies)
        return total

    def moment_target(self, one: RankParameter, name: str, num_steps: int) -> Tensor | None:
        """Return the tensor that a loaded moment is copied to; None where another copy keeps it."""
        if self._zero is not None and not self._is_mine(one.parameter):
            return None
        state = self._inner_state.setdefault(one.parameter, {})
        if OPTIMIZERS[self._config.kind].counts_steps:
            state[_STEP] = torch.tensor(float(num_steps), device=local_slice(one.parameter).device)
        value: Tensor = state.setdefault(name, self._zero_moment(one, name))
        return value

    def _zero_moment(self, one: RankParameter, name: str) -> Tensor:
        shape = moment_shapes(self._config.kind, one.parameter.shape)[name]
        if is_in_bytes(name):
            return one.parameter.detach().new_zeros(shape, dtype=torch.uint8)
        if shape == tuple(one.parameter.shape):
            # shared out as the parameter is
            return torch.zeros_like(one.parameter.detach())
        return one.parameter.detach().new_zeros(shape)

    @property
    def _inner_optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self._optimizer if self._zero is None else self._zero.optim
        return inner

    @property
    def _inner_state(self) -> dict[Tensor, Any]:
        return self._inner_optimizer.state

    def _is_mine(self, parameter: nn.Parameter) -> bool:
        return any(parameter is mine for group in self._inner_optimizer.param_groups for mine in group["params"])


def _sharing_optimizer() -> Any:
    """Torch's optimizer that shares its state; the package around it compiles others by a deprecated way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

        return ZeroRedundancyOptimizer


_FIRST = 2.0**16
_HIGHEST = 2.0**24
_PATIENCE = 2000


class LossScale:
    """A power of two that is halved when a gradient overflows, and doubled after 2000 steps in which none did.

    All ranks see the same norm of the whole gradient, so they halve and double together, which torch's own scaler
    leaves to each process. A step that overflowed is done again; no batch is lost to it.

    Args:
        is_needed: True in float16; otherwise the scale is 1 for good.

    Source: Micikevicius et al. 2018, section 3.2.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.value = _FIRST if is_needed else 1.0
        self._is_needed = is_needed
        self._clean_steps = 0

    def halve_scale(self) -> bool:
        """Halve the scale after an overflow; False where it is 1 already, so that it was not to blame."""
        self._clean_steps = 0
        if self.value <= 1.0:
            return False
        self.value /= 2.0
        return True

    def note_applied_step(self) -> None:
        """A step was applied."""
        self._clean_steps += 1
        if self._is_needed and self._clean_steps >= _PATIENCE:
            self.value = min(_HIGHEST, 2.0 * self.value)
            self._clean_steps = 0
