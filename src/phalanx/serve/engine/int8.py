"""Linear layers in 8-bit integers: a quarter of the memory to read, and sums that no batch can change."""

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ModelError

_MAX = 127


class Int8Linear(nn.Module):
    """A linear layer whose weights are integers by output and whose inputs become integers by row.

    Sums of integers are exact, so that the output of a row has the same bits whatever the number of rows.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scale = weight.float().abs().amax(dim=1).clamp(min=1e-12) / _MAX
        self.register_buffer("weight", (weight.float() / scale[:, None]).round().to(torch.int8), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _MAX
        integers = (rows / scale).round_().to(torch.int8)
        weight, bias = self.get_buffer("weight"), self.bias
        output = torch._int_mm(integers, weight.t()).float().mul_(scale).mul_(self.get_buffer("scale"))
        if isinstance(bias, Tensor):
            output += bias
        return output.to(inputs.dtype).reshape(*inputs.shape[:-1], -1)


def quantize_model(model: Any) -> None:
    """Replace the linear layers of a model.

    Raises:
        ModelError: It has none.
    """
    linears = [
        (module, name, layer)
        for module in model.modules()
        for name, layer in module.named_children()
        if type(layer) is nn.Linear
    ]
    if not linears:
        raise ModelError(f"{type(model).__name__}: has no linear layers of torch, so that int8 would change nothing")
    for module, name, layer in linears:
        setattr(module, name, Int8Linear(layer.weight.detach(), None if layer.bias is None else layer.bias.detach()))
