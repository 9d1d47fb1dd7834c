"""Frozen matrices in 4 or 8 bits: their storage, and products that keep no wider copy."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from phalanx.config.extras import import_bitsandbytes, require_bitsandbytes
from phalanx.errors import ModelError
from phalanx.models.config import Quantization
from phalanx.models.quiet import one_at_a_time
from phalanx.models.stage import StageModule, canonical_name

_BLOCK = 64
"""Numbers of nf4 that share a scale."""


class QuantizedLinear(nn.Module):
    """A frozen matrix in few bits with its bias, in the place of a linear layer.

    The matrix is widened for each product, forward and backward, to the type of the other factor (in autocast:
    autocast's type), and released. Made on the meta device.

    Args:
        kind: nf4 has one scale for 64 numbers in a row of the matrix and on, int8 one for each output.

    Guarantees:
        Widening is a multiplication of float32 a number: all machines get the same bits of the same bytes.

    Source: Dettmers et al. 2023 (QLoRA), section 3, without double quantisation; Dettmers et al. 2022 (LLM.int8),
    section 3, for the scale of an output. Products are not taken in int8.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, kind: Quantization, name: str) -> None:
        super().__init__()
        self._kind, self._name = kind, name
        weight = layer.get_parameter("weight")
        self._is_turned = isinstance(layer, Conv1D)
        self.outputs, self.inputs = reversed(weight.shape) if self._is_turned else weight.shape
        if kind == "nf4":
            if self.inputs % 2:
                raise ModelError(f'{name}: has {self.inputs} inputs, nf4 packs pairs; take quantize = "int8"')
            packed = torch.empty(self.outputs, self.inputs // 2, dtype=torch.uint8, device="meta")
            scales = -(-weight.numel() // _BLOCK)
        else:
            packed = torch.empty(self.outputs, self.inputs, dtype=torch.int8, device="meta")
            scales = self.outputs
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.absmax = nn.Parameter(torch.empty(scales, device="meta"), requires_grad=False)
        bias = layer.bias
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)

    @property
    def file_shape(self) -> tuple[int, int]:
        """The shape of the matrix in the model's files."""
        return (self.inputs, self.outputs) if self._is_turned else (self.outputs, self.inputs)

    @torch.no_grad()
    def quantize_values(self, values: Tensor) -> None:
        """Quantise float32 values of the shape that the model's files have. On the CPU: other kernels differ in ties.

        Raises:
            ModelError: The shape is another one, or a number is not finite.
        """
        matrix = (values.T if self._is_turned else values).contiguous()
        if matrix.shape != (self.outputs, self.inputs) or not bool(torch.isfinite(matrix).all()):
            raise ModelError(
                f"{self._name}: found {list(matrix.shape)}, expected finite numbers {[self.outputs, self.inputs]}"
            )
        kernels = _load_kernels()
        if self._kind == "nf4":
            packed, scales = kernels.quantize_4bit(matrix, _BLOCK, "nf4", torch.uint8)
        else:
            packed, scales, _ = kernels.int8_vectorwise_quant(matrix)
        self.weight.copy_(packed.view(self.weight.shape))
        self.absmax.copy_(scales)

    def widen_matrix(self, dtype: torch.dtype) -> Tensor:
        """The matrix, ``[outputs, inputs]``, in a wider type."""
        kernels = _load_kernels()
        if self._kind == "nf4":
            # bitsandbytes 0.50 takes the scales of another row on the CPU where blocks end inside of one
            flat = self.inputs % _BLOCK != 0
            shape = (1, self.outputs * self.inputs) if flat else (self.outputs, self.inputs)
            wide = kernels.dequantize_4bit(self.weight, self.absmax, _BLOCK, "nf4", shape, dtype)
            matrix: Tensor = wide.view(self.outputs, self.inputs)
        else:
            matrix = kernels.int8_vectorwise_dequant(self.weight, self.absmax).to(dtype)
        return matrix

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., inputs]``."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = _QuantizedProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _QuantizedProduct(torch.autograd.Function):
    """A product that keeps neither its input, for nothing of the matrix is learned, nor the matrix in a wider type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.widen_matrix(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.widen_matrix(gradients[0].dtype), None


def quantize_blocks(stage: StageModule, kind: Quantization) -> None:
    """Put quantised matrices, on the meta device, in the place of the frozen linear layers of a stage's blocks.

    Raises:
        ModelError: The family is an encoder with a decoder, which asks its layers for the type of their weights.
    """
    require_bitsandbytes("model.adapter.quantize")
    if stage.family.facts.predicts == "target":
        raise ModelError(f"model.adapter.quantize: it is not tried with {stage.family.model_type}; remove it")
    modules = dict(stage.named_modules())
    inside = {id(part) for block in stage.own_blocks for part in block.modules()}
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D) and not module.weight.requires_grad:
            setattr(modules[parent], leaf, QuantizedLinear(module, kind, canonical_name(name)))


def quantized_layers(stage: StageModule) -> Mapping[str, QuantizedLinear]:
    """The quantised matrices of a stage, by the canonical names of their weights."""
    return {
        canonical_name(f"{name}.weight"): module
        for name, module in stage.named_modules()
        if isinstance(module, QuantizedLinear)
    }


@functools.cache
def _load_kernels() -> Any:
    """Bitsandbytes' operators."""
    require_bitsandbytes("model.adapter.quantize")
    # no other thread may patch torch meanwhile
    with one_at_a_time():
        import_bitsandbytes()
    return torch.ops.bitsandbytes
