"""Stages that compute with bf16 weights and keep fp32 masters of trained ones."""

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.models.stage import StageModule

NARROW = torch.bfloat16
"""What weights, activations and the gradients of one microbatch are in; between stages they are float32."""


def keep_masters(stage: StageModule) -> None:
    """Turn a stage's weights into bf16 and keep float32 masters of the trained ones; a second call does nothing.

    Afterwards the stage lists the masters as its parameters: they are updated, digested and stored. Before each call
    the weights are rounded from the masters. What goes in and comes out is float32 as ever.

    Guarantees:
        The update is that of float32 weights: an update below the last place of bf16 adds up in the master.

    Source: Micikevicius et al. 2018 (mixed precision), section 3.1.
    """
    if stage.computing:
        return
    masters: dict[str, nn.Parameter] = {}
    computing: dict[str, nn.Parameter] = {}
    for name, parameter in stage.all_parameters().items():
        if parameter.requires_grad:
            masters[name] = nn.Parameter(parameter.detach().clone())
            computing[name] = parameter
        # in place, so that a tied head stays the embedding itself
        parameter.data = parameter.detach().to(NARROW)
    stage.masters, stage.computing = masters, computing

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        _round_masters(masters, computing)
        x: Tensor = given[0]
        return (x.to(NARROW) if x.is_floating_point() else x, *given[1:])

    def after(_: nn.Module, __: tuple[Any, ...], result: Tensor) -> Tensor:
        return result.to(torch.float32)

    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(after)


def _round_masters(masters: dict[str, nn.Parameter], computing: dict[str, nn.Parameter]) -> None:
    """Round the masters into the weights.

    Always, for torch's fused update counts no version of its outputs; and into `data`, for graphs of other microbatches
    of the step hold these weights, with the values that they get again.
    """
    for name, master in masters.items():
        computing[name].data.copy_(master.data)
