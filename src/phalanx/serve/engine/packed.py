"""Linear layers whose weights lie in the order in which the processor multiplies: half the time of a decode step."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from phalanx.errors import ModelError

_PACKED_FOR_ROWS = 64
"""Rows that the order is chosen for; it is as fast for 1 to 256."""


class PackedLinear(nn.Module):
    """A linear layer of oneDNN, in the numbers of its weights.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the processor.
        bias: ``[out]``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        # an opaque tensor, which no state_dict can hold
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return output


def pack_model(model: Any) -> int:
    """Pack the linear layers of a model, whose own weights are then freed; return how many.

    A layer stays as it is where this build of torch cannot pack it, or computes another product.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    verdicts: dict[tuple[torch.Size, torch.dtype], bool] = {}
    num_packed = 0
    # the two factors of an adapter lie in dictionaries, and peft reads their weights
    for parent in [module for module in model.modules() if not isinstance(module, nn.ModuleDict)]:
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or not _can_pack(layer.weight):
                continue
            packed = PackedLinear(layer.weight, layer.bias)
            kind = layer.weight.shape, layer.weight.dtype
            if kind not in verdicts:
                verdicts[kind] = _agrees(packed, layer)
            if verdicts[kind]:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and (
        weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and can_multiply_bfloat16())
    )


def can_multiply_bfloat16() -> bool:
    """Return whether oneDNN has products in bfloat16 for this processor; with AVX2 alone it has none."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.inference_mode()
def _agrees(packed: PackedLinear, layer: nn.Linear) -> bool:
    """Compare the products of one layer with torch's, which are rounded in another order."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, layer.in_features, generator=generator).to(layer.weight.dtype)
    expected = linear(inputs, layer.weight, layer.bias).float()
    tolerance = 1e-4 if layer.weight.dtype is torch.float32 else 2e-2
    return bool((packed(inputs).float() - expected).abs().max() <= tolerance * expected.abs().max())


def check_fixed_rows(model: Any) -> None:
    """Compare the products of rows in batches of several sizes, by every shape of weights in the model.

    Raises:
        ModelError: They differ in a bit.
    """
    products: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {
        tuple(weight.shape): partial(linear, weight=weight) for weight in model.parameters() if weight.dim() == 2
    }
    packed = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    products |= {(layer.out_features, layer.in_features): layer for layer in packed}
    generator = torch.Generator().manual_seed(0)
    dtype = model.dtype
    for shape, multiply in islice(products.items(), 16):
        inputs = torch.randn(64, shape[1], generator=generator).to(dtype)
        products_of_all = multiply(inputs)
        for rows in (4, 5, 7, 8, 13, 32):
            if not torch.equal(multiply(inputs[64 - rows :]), products_of_all[64 - rows :]):
                raise ModelError(f"reproducible: here the products of {rows} and of 64 rows differ in their bits")
