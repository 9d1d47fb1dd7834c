"""AdamW with moments of a byte a number, by bitsandbytes' operator."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.config.extras import import_bitsandbytes, require_bitsandbytes
from phalanx.optimizers.single_rounding import UpdateRule
from phalanx.planner.model.optimizers import is_in_bytes, moment_shapes


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with a byte for each number of a moment and a scale for 256; small tensors keep float32.

    A state has what `moment_shapes` tells, by the same names, and the number of steps.

    Source: Dettmers et al. 2022 (8-bit optimizers via block-wise quantization), section 2.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        require_bitsandbytes('optimizer.kind = "adamw8bit"')

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # returns no loss
        """Make one step with the gradients that are in the parameters; `closure` is torch's and not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, parameter.grad, group)

    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(new_moments(parameter))
        state["step"] = state.get("step", torch.zeros(())) + 1
        rule = UpdateRule(group["lr"], group["betas"], group["eps"], int(state["step"]))
        apply_in_few_bits(rule, parameter, gradient, state, group["weight_decay"])


def new_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter before its first update."""
    return {
        name: torch.zeros(shape, dtype=torch.uint8 if is_in_bytes(name) else torch.float32, device=parameter.device)
        for name, shape in moment_shapes("adamw8bit", parameter.shape).items()
    }


def apply_in_few_bits(
    rule: UpdateRule, weight: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], weight_decay: float
) -> None:
    """Make one update in place, as `UpdateRule.apply_update` does for tensors that are too small for bytes."""
    if "exp_avg" in moments:
        rule.apply_update(weight, gradient, moments["exp_avg"], moments["exp_avg_sq"], weight_decay)
        return
    operators, signed, unsigned = _load_kernels()
    # the third and fourth decay are those of other optimizers that share the operator
    operators.optimizer_update_8bit_blockwise(
        "adam",
        gradient.contiguous(),
        weight,
        moments["exp_avg_8bit"],
        moments["exp_avg_sq_8bit"],
        *(*rule.betas, 0.0, 0.0, rule.eps, rule.num_updates, rule.lr),
        signed.to(weight.device),
        unsigned.to(weight.device),
        moments["exp_avg_scale"],
        moments["exp_avg_sq_scale"],
        weight_decay,
        1.0,
    )


@functools.cache
def _load_kernels() -> tuple[Any, Tensor, Tensor]:
    """Return bitsandbytes' operators, and the values of a byte in a signed moment and in an unsigned one."""
    import_bitsandbytes()
    create_map = importlib.import_module("bitsandbytes.functional").create_dynamic_map
    return torch.ops.bitsandbytes, create_map(signed=True), create_map(signed=False)
