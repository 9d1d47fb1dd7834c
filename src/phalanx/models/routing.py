"""Router losses of a mixture of experts: each block's own, added where the block is, so that no sum has to travel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func


@dataclass(frozen=True)
class RouterBalance:
    """The loss of a block's router: how unevenly a microbatch's tokens ask the experts.

    Attributes:
        router: Name of the module in a block that gives logits of experts first.
        num_asked: Experts that each token asks.
        weight: The loss is multiplied by it: its coefficient, over all blocks and microbatches.

    Source: Fedus et al. 2022, equations 4 to 6, for each block by itself, as transformers computes it of one.
    """

    router: str
    num_experts: int
    num_asked: int
    weight: float

    def run_block(self, block: nn.Module, call: Callable[[], Tensor]) -> Tensor:
        """Run a block and return its output, with the gradient of the router's loss added."""
        logits: list[Tensor] = []

        def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
            del module, inputs
            logits.append(outputs[0])

        watched = block.get_submodule(self.router).register_forward_hook(note)
        try:
            hidden = call()
        finally:
            watched.remove()
        loss = load_balancing_loss_func((logits[0],), self.num_experts, self.num_asked)
        return _AddedLoss.apply(hidden, loss * self.weight)  # type: ignore[no-any-return,no-untyped-call]


class _AddedLoss(torch.autograd.Function):
    """Hands hidden states on, and starts the backward pass of a loss when theirs comes by."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.like = (loss.dtype, loss.device)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dtype, device = ctx.like
        return gradients[0], torch.ones((), dtype=dtype, device=device)
