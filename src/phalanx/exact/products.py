"""Matrix products of fixed-point integers, which no order of additions changes.

Rows of the left operand and columns of the right one are rounded to integers with a power of two as their scale. The
inner dimension is cut into runs of 2048; the product of a run is an integer of at most 53 bits, so one float64 product
gives it exactly, and so do products of int8 digits. Runs are added in float64 in their order.
"""

import functools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from phalanx.exact.functions import exponent_above, power_of_two
from phalanx.exact.fused import open_kernels

RUN = 2048
"""Terms of a sum that float64 holds exactly: ``2**21 * 2**21 * 2048 = 2**53``."""

BITS = {"exact": 21, "exact_fast": 14}
"""Bits of an integer beside its sign: float32's accuracy, and better than that of bfloat16."""

_DIGITS = {21: 3, 14: 2}
_MIN_WORK = 2**21
"""Multiplications below which digits cost more than they save."""

_MIN_FUSED = 2**14
"""Numbers of a matrix from which a compiled kernel rounds it, if there is one."""

_ROWS = 256
"""Rows of a result that are made at once, to stay in a core's cache."""


@dataclass
class FixedPoint:
    """A matrix ``[..., rows, inner]`` of integers, held as float32, with a power of two for each row.

    Attributes:
        bits: All integers are at most ``2**bits``.
        scale: float64 ``[..., rows, 1]``; NaN for a row with a number that is not finite, whose integers are 0.
    """

    integers: Tensor
    scale: Tensor
    bits: int

    @classmethod
    def round_rows(cls, x: Tensor, bits: int) -> "FixedPoint":
        """Round each row of a float32 matrix to multiples of its own power of two, ties to even."""
        if x.numel() >= _MIN_FUSED and x.dim() == 2 and x.device.type == "cpu":
            kernels = open_kernels()
            if kernels is not None and 1 in x.stride():
                integers, digits, scale = kernels.round_rows(x, bits, _DIGITS[bits])
                rounded = cls(integers, scale, bits)
                # a cached property that is there already
                rounded.__dict__["digits"] = digits
                return rounded
        greatest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
        exponent = exponent_above(greatest.clamp(min=2.0**-100))
        factor, scale = power_of_two(bits - exponent).to(torch.float32), power_of_two(exponent - bits)
        finite = torch.isfinite(greatest)
        if bool(finite.all()):
            return cls((x * factor).round_(), scale, bits)
        return cls(torch.where(finite, x * factor, 0.0).round_(), torch.where(finite, scale, torch.nan), bits)

    @cached_property
    def wide(self) -> Tensor:
        """The integers in float64."""
        return self.integers.to(torch.float64)

    @cached_property
    def digits(self) -> list[Tensor]:
        """int8 digits to the base 256, the least first, each from -128 to 127."""
        rest, digits = self.integers.to(torch.int32), []
        for _ in range(_DIGITS[self.bits] - 1):
            digit = rest.to(torch.int8)
            digits.append(digit)
            rest = rest.sub_(digit) >> 8
        return [*digits, rest.to(torch.int8)]


def multiply(left: FixedPoint, right: FixedPoint) -> Tensor:
    """Return ``left @ right.mT`` in float32, rounded once from the sum of its runs.

    Args:
        left: ``[..., rows, inner]``.
        right: ``[..., columns, inner]``, of as many bits.
    """
    rows, inner, columns = left.integers.shape[-2], left.integers.shape[-1], right.integers.shape[-2]
    # with strides of a single column oneDNN takes rows for columns
    in_digits = left.integers.dim() == 2 and rows * inner * columns >= _MIN_WORK and inner % RUN != 1
    if not (in_digits and digits_are_exact()):
        return _scale_total(_wide_sum(left, right), left.scale, right.scale)
    result = torch.empty(rows, columns, dtype=torch.float32, device=left.integers.device)
    kernels = open_kernels() if result.device.type == "cpu" else None
    for first in range(0, rows, _ROWS):
        block = slice(first, first + _ROWS)
        if kernels is None:
            result[block] = _scale_total(_digit_sum(left, right, block), left.scale[block], right.scale)
        else:
            runs = (_multiply_digits(left, right, block, run) for run in _list_runs(inner))
            kernels.scale_sum(runs, -(-inner // RUN), left.scale[block], right.scale, result[block])
    return result


def _scale_total(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    # a sum of zeros has the sign that its library leaves; + 0.0 makes each of them positive
    return total.mul_(left).mul_(right.mT).to(torch.float32).add_(0.0)


def _list_runs(inner: int) -> list[slice]:
    return [slice(first, first + RUN) for first in range(0, max(1, inner), RUN)]


def _wide_sum(left: FixedPoint, right: FixedPoint) -> Tensor:
    runs = _list_runs(left.integers.shape[-1])
    return functools.reduce(Tensor.add_, (left.wide[..., run] @ right.wide[..., run].mT for run in runs))


def _digit_sum(left: FixedPoint, right: FixedPoint, block: slice) -> Tensor:
    """As `_wide_sum`, of some rows, by products of digits."""
    runs = _list_runs(left.integers.shape[-1])
    return functools.reduce(Tensor.add_, (_digit_product(left, right, block, run) for run in runs))


def _multiply_digits(left: FixedPoint, right: FixedPoint, block: slice, run: slice) -> list[Tensor]:
    """int32 products of each digit on the left with each on the right."""
    return [torch._int_mm(low[block, run], high[:, run].mT) for low in left.digits for high in right.digits]


def _digit_product(left: FixedPoint, right: FixedPoint, block: slice, run: slice) -> Tensor:
    """The integer of one run: sums of digits' products stay below ``2**31``, sums of Horner's rule at most 2**53."""
    sums: dict[int, Tensor] = {}
    for index, part in enumerate(_multiply_digits(left, right, block, run)):
        place = sum(divmod(index, len(right.digits)))
        sums[place] = sums[place].add_(part) if place in sums else part
    places = sorted(sums, reverse=True)
    product = sums[places[0]].to(torch.float64)
    for place in places[1:]:
        product.mul_(256.0).add_(sums[place])
    return product


@functools.cache
def digits_are_exact() -> bool:
    """Whether this machine's int8 product holds sums of the greatest digits; some instructions cut them at 16 bits."""
    low = torch.full((32, RUN), -128, dtype=torch.int8)
    high = torch.full((RUN, 32), 127, dtype=torch.int8)
    low[::2] = 127
    high[:, ::3] = -128
    try:
        product = torch._int_mm(low, high)
    except RuntimeError:
        return False
    return torch.equal(product.to(torch.float64), low.to(torch.float64) @ high.to(torch.float64))
