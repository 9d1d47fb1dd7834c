"""AdamW with moments of a byte a number, by bitsandbytes' operator."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.config.extras import import_bitsandbytes, require_bitsandbytes
from phalanx.optimizers.single_rounding import UpdateRule
from phalanx.planner.model.optimizers import is_in_bytes, moment_shapes


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with a byte for each number of a moment and a scale for 256; small tensors keep float32.

    A state has what `moment_shapes` tells, by the same names, and the number of steps.

    Raises:
        ConfigError: bitsandbytes is not installed.

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
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        kept = self.state[parameter]
        for name, shape in moment_shapes("adamw8bit", parameter.shape).items():
            if name not in kept:
                kept[name] = parameter.new_zeros(shape, dtype=torch.uint8 if is_in_bytes(name) else torch.float32)
        kept["step"] = kept.get("step", torch.zeros(())) + 1
        num_updates, decay = int(kept["step"]), group["weight_decay"]
        if "exp_avg" in kept:
            rule = UpdateRule(group["lr"], group["betas"], group["eps"], num_updates)
            rule.apply(parameter, gradient, kept["exp_avg"], kept["exp_avg_sq"], decay)
            return
        operators, signed, unsigned = _kernels()
        # the third and fourth decay are those of other optimizers that share the operator
        operators.optimizer_update_8bit_blockwise(
            "adam",
            gradient.contiguous(),
            parameter,
            kept["exp_avg_8bit"],
            kept["exp_avg_sq_8bit"],
            *(*group["betas"], 0.0, 0.0, group["eps"], num_updates, group["lr"]),
            signed.to(parameter.device),
            unsigned.to(parameter.device),
            kept["exp_avg_scale"],
            kept["exp_avg_sq_scale"],
            decay,
            1.0,
        )


@functools.cache
def _kernels() -> tuple[Any, Tensor, Tensor]:
    """Bitsandbytes' operators, and what a byte stands for in a moment with a sign and in one without."""
    import_bitsandbytes()
    made = importlib.import_module("bitsandbytes.functional").create_dynamic_map
    return torch.ops.bitsandbytes, made(signed=True), made(signed=False)
