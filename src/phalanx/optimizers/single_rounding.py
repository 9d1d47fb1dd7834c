"""AdamW in operations that IEEE 754 rounds once each, so that every processor gets the same bits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UpdateRule:
    """The numbers of one update that all tensors have in common.

    Attributes:
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        num_updates: Updates of these moments, this one included.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    num_updates: int

    def apply_update(
        self, weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weight_decay: float
    ) -> None:
        """Make one update in place; the gradient is not changed.

        Each line is one addition, multiplication, division or root per number. Fused kernels merge some of these,
        other ones on each instruction set. A division by a plain number is left out: a GPU multiplies by its inverse.
        The root is not torch's own, which is MKL's and off by one unit in the last place for one number in 6 to 5,000.

        Guarantees:
            The same bits wherever float32 arithmetic follows IEEE 754, which processors with AVX2, AVX-512, NEON and
            CUDA do without fast-math flags. Measured for the kernels of torch and of MKL for x86 without vectors, with
            AVX2 and with AVX-512.

        Source: Loshchilov and Hutter 2019 (decoupled weight decay).
        """
        first, second = self.betas
        weight.mul_(1.0 - self.lr * weight_decay)
        exp_avg.mul_(first).add_(gradient * (1.0 - first))
        square = gradient * gradient
        exp_avg_sq.mul_(second).add_(square.mul_(1.0 - second))
        root = _rounded_root(exp_avg_sq)
        root.mul_(1.0 / math.sqrt(1.0 - _rounded_power(second, self.num_updates))).add_(self.eps)
        step = exp_avg / root
        weight.sub_(step.mul_(self.lr / (1.0 - _rounded_power(first, self.num_updates))))


def _rounded_root(square: Tensor) -> Tensor:
    """The square root, rounded once.

    The root of a float32 lies at least four units of float64 away from every number halfway between two of float32. So
    a float64 root that is off by less than that is rounded to the right one.
    """
    return square.to(torch.float64).sqrt_().to(square.dtype)


def _rounded_power(base: float, exponent: int) -> float:
    """By squaring: the power function of each C library rounds in its own way."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
