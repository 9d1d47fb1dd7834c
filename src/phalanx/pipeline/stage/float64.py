"""Recompute one microbatch in a wider type: a referee without rounding of its own, for the grey zone."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.stage.stage_copy import StageCopy, seeded_mean


class WideRunner(StageRunner):
    """A copy of a stage, weights included, that computes in a wider type; for audits, not for training.

    The weights are those of the moment of construction. Dropout draws the masks of the copied stage.

    Guarantees:
        Every operation works in `dtype`, casts to float32 inside a block (norms, softmax, rotary angles of
        some families) included. In float64 what remains is 2^29 times below float32 rounding, so the
        distance of a float32 message to the result is that message's own rounding error.
    """

    def __init__(self, runner: StageRunner, dtype: torch.dtype = torch.float64) -> None:
        module = copy.deepcopy(runner.module).to(dtype)
        # a checkpointed block would run a second time outside of `recompute`'s casts
        module.activation_checkpointing = False
        super().__init__(
            module,
            runner.spec,
            seed=runner.seed,
            precision="fp32",
            device=runner.device,
            row_clip=runner.row_clip,
        )
        self._dtype = dtype

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """As `StageRunner.forward`; the result is in the wider type."""
        with _WideCasts(self._dtype):
            return super().forward(step, microbatch, x.to(self._dtype))

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `StageRunner.recompute_microbatch`; the results are in the wider type."""
        with _WideCasts(self._dtype):
            return super().recompute_microbatch(step, microbatch, x.to(self._dtype), gradient)


def recompute_in(
    dtype: torch.dtype, runner: StageRunner, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Redo one microbatch in `dtype`; the runner is left as it was.

    Args:
        dtype: ``torch.float64``.
        runner: Holds the weights that both sides have signed.
        step: Optimizer step, for the dropout masks.
        x: The committed input ``[batch, seq, dim]``.
        gradient: The committed gradient of the output ``[batch, seq, dim]``; None for the forward alone.

    Returns:
        The output, and the gradient of the input when `gradient` is given, both in `dtype`.
    """
    return WideRunner(runner, dtype).recompute_microbatch(step, microbatch, x, gradient)


def exact_gradient(
    stage: StageCopy, step: int, inputs: Sequence[tuple[Tensor, Tensor]], noise_seeds: Mapping[str, bytes]
) -> dict[str, Tensor]:
    """Redo a stage's whole step in float64 and return its weight gradient by name, as a party commits to it.

    Args:
        stage: Holds the weights that both sides have signed, and no gradient.
        inputs: Of each microbatch, input and gradient of the output, ``[batch, seq, dim]`` each.
        noise_seeds: Of the noise on each tensor; nothing where rows are not hidden.
    """
    wide, privacy = WideRunner(stage.runner), stage.plan.privacy
    for microbatch, (x, gradient) in enumerate(inputs):
        wide.forward(step, microbatch, x)
        wide.backward(step, microbatch, gradient)
    gradients = wide.take_gradients()
    return gradients if privacy is None else seeded_mean(gradients, privacy, noise_seeds)


class _WideCasts(TorchFunctionMode):
    """Models that go up to float32 for a norm or a softmax go up to the wider type instead."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wider = [self._dtype if value is torch.float32 else value for value in args]
        named = {key: self._dtype if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].to(self._dtype)
        return func(*wider, **named)
