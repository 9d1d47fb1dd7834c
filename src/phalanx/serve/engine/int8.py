"""Linear layers in 8-bit integers: a quarter of the memory to read, and sums that no batch can change."""

import logging
import time
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ModelError

_MAX = 127
_EXACT_COLUMNS = (1 << 24) // (_MAX * _MAX)
"""float32 holds each sum of so many products of two such integers, whatever their order."""
_log = logging.getLogger(__name__)


class Int8Linear(nn.Module):
    """A linear layer whose weights are integers by output and whose inputs become integers by row.

    Sums of integers are exact, so that the output of a row has the same bits whatever the number of rows.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]``.
        in_floats: Compute the same sums, bit for bit, by products of float32, for processors without 8-bit ones; the
            weights then take four bytes each.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, in_floats: bool = False) -> None:
        super().__init__()
        scale = weight.float().abs().amax(dim=1).clamp(min=1e-12) / _MAX
        integers = (weight.float() / scale[:, None]).round()
        parts = torch.split(integers, _EXACT_COLUMNS, dim=1) if in_floats else ()
        self._parts = nn.ModuleList(_make_linear(part) for part in parts)
        self.register_buffer("weight", None if in_floats else integers.to(torch.int8), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _MAX
        bias = self.bias
        output = self._multiply((rows / scale).round_()).mul_(scale).mul_(self.get_buffer("scale"))
        if isinstance(bias, Tensor):
            output += bias
        return output.to(inputs.dtype).reshape(*inputs.shape[:-1], -1)

    def _multiply(self, integers: Tensor) -> Tensor:
        """Return the sums of integers ``[rows, in]``, each rounded to float32 once."""
        if not len(self._parts):
            return torch._int_mm(integers.to(torch.int8), self.get_buffer("weight").t()).float()
        pieces = torch.split(integers, _EXACT_COLUMNS, dim=1)
        sums: list[Tensor] = [part(piece) for piece, part in zip(pieces, self._parts, strict=True)]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0, dtype=torch.float64).float()


def _make_linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return layer


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
    in_floats = not has_fast_integers()
    if in_floats:
        _log.warning(
            "int8: this processor has no fast products of 8-bit integers; the same texts are computed in float32, and "
            "neither memory nor time is saved"
        )
    for module, name, layer in linears:
        bias = None if layer.bias is None else layer.bias.detach()
        setattr(module, name, Int8Linear(layer.weight.detach(), bias, in_floats=in_floats))


@torch.inference_mode()
def has_fast_integers() -> bool:
    """Return whether a product of 8-bit integers takes less than twice the time of one of float32 here."""
    integers, weight = torch.ones(8, 512, dtype=torch.int8), torch.ones(1024, 512, dtype=torch.int8)
    floats, float_weight = integers.float(), weight.float()

    def measure_s(multiply: Any, *operands: Tensor) -> float:
        multiply(*operands)
        spent = []
        for _ in range(5):
            start = time.thread_time()
            multiply(*operands)
            spent.append(time.thread_time() - start)
        return min(spent)

    return measure_s(torch._int_mm, integers, weight.t()) < 2 * measure_s(nn.functional.linear, floats, float_weight)
