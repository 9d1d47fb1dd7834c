"""Compute with rounded weights, which is cheaper; rounding is done as quantisers do it, row by row."""

import torch
from torch import Tensor

from phalanx.lab.attacks.states.twin import AlteredModuleAttack, AlteredWeights
from phalanx.models import StageModule
from phalanx.pipeline import StageCopy


class LazyBf16(AlteredModuleAttack):
    """Weights in bfloat16 instead of fp32."""

    def make_module(self, copy: StageCopy) -> StageModule:
        """The stage with rounded weights."""
        return AlteredWeights(copy.module, lambda name, weight: self.round_weight(weight))

    def round_weight(self, weight: Tensor) -> Tensor:
        """The weight as it is computed with."""
        return weight.to(torch.bfloat16).to(weight.dtype)


class LazyInt8(LazyBf16):
    """Matrices in 8-bit integers with one scale per row."""

    levels = 127

    def round_weight(self, weight: Tensor) -> Tensor:
        """Round matrices; biases and norms cost next to nothing and stay."""
        if weight.ndim < 2:
            return weight
        scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / self.levels
        return torch.round(weight / scale) * scale


class LazyInt4(LazyInt8):
    """Matrices in 4-bit integers with one scale per row."""

    levels = 7
