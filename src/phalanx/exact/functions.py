"""Elementary functions and sums made of operations that IEEE 754 rounds once each, in a fixed order.

torch's own exp, log, tanh, erf, cos, sums and normal draws come from MKL, Sleef or a C library, each with bits of its
own. Here every line is one addition, multiplication, division or conversion of a whole block; eager operations do not
join a multiplication and an addition into one. A float64 root may be off by a unit, and is rounded to float32 first.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 2**15
"""Numbers that stay in a core's cache while a function passes over them."""

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ERF_SERIES = tuple((-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(24, -1, -1))
_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1))
_INVERSE_ERF_MIDDLE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503),
    *(-0.00417768164, 0.246640727, 1.50140941),
)
_INVERSE_ERF_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613),
    *(0.00943887047, 1.00167406, 2.83297682),
)
_LN2, _LOG2E, _SQRT_HALF = 0.6931471805599453, 1.4426950408889634, 0.7071067811865476


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2.0 ** exponent`` in float64 by its bits; exponents from -1022 to 1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def exponent_above(x: Tensor) -> Tensor:
    """Return the int32 exponent e of float32 numbers with ``|x| < 2**e``, the least one for normal numbers."""
    return ((x.contiguous().view(torch.int32) >> 23) & 255) - 126


def _in_blocks(x: Tensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    flat = x.contiguous().view(-1)
    result = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    for first in range(0, flat.numel(), _BLOCK):
        block = slice(first, first + _BLOCK)
        result[block] = function(flat[block].to(dtype))
    return result.view(x.shape)


def _sum_powers(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[-1])


def exp_block(x: Tensor) -> Tensor:
    """In float32, to about a unit in the last place; 0 below -87.7, infinite above 88.4. Source: Cephes, expf."""
    x = x.clamp(-88.1, 89.0)
    n = (x * _LOG2E).round_()
    r = x.sub_(n * 0.693359375).sub_(n * -2.12194440e-4)
    power = _sum_powers(r, _EXP).mul_(r).mul_(r).add_(r).add_(1.0)
    return power.mul_((n.to(torch.int32).add_(127) << 23).view(torch.float32))


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x."""
    return _in_blocks(x, exp_block, torch.float32)


def _wide_exp(x: Tensor) -> Tensor:
    """In float64, to about 1e-15."""
    x = x.clamp(-700.0, 700.0)
    n = (x * _LOG2E).round_()
    r = x.sub_(n * 0.693147180369123816490).sub_(n * 1.90821492927058770002e-10)
    return _sum_powers(r, tuple(1 / math.factorial(i) for i in range(13, -1, -1))).mul_(power_of_two(n))


def expm1(x: Tensor) -> Tensor:
    """Return e to the power of x, less one, from float64."""
    return _in_blocks(x, lambda block: _wide_exp(block).sub_(1.0))


def _log(x: Tensor) -> Tensor:
    """In float64, to about 1e-14; -inf of 0, NaN below."""
    bits = x.contiguous().view(torch.int64)
    n = (((bits >> 52) & 2047) - 1022).to(torch.float64)
    mantissa = ((bits & (2**52 - 1)) | (1022 << 52)).view(torch.float64)
    is_low = mantissa < _SQRT_HALF
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    n.sub_(is_low.to(torch.float64))
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _sum_powers(s * s, tuple(1 / (2 * i + 1) for i in range(9, -1, -1))).mul_(s).mul_(2.0)
    result = series.add_(n.mul_(_LN2))
    result = torch.where(x > 0, result, torch.where(x == 0, -math.inf, math.nan))
    return torch.where(x == math.inf, x, result)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    return _in_blocks(x, _log)


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return positive bases to the power of exponents, by float64 logarithms, broadcast."""
    return _wide_exp(_log(base.to(torch.float64)) * exponent.to(torch.float64))


def integer_power(x: Tensor, exponent: int) -> Tensor:
    """Return x multiplied by itself; by squaring, so 2 and 3 are the plain products."""
    result, square, rest = None, x, abs(exponent)
    while rest:
        if rest & 1:
            result = square if result is None else result * square
        square = square * square if rest > 1 else square
        rest >>= 1
    if result is None:
        return torch.ones_like(x)
    return result if exponent > 0 else 1.0 / result


def root(x: Tensor) -> Tensor:
    """Return the square root, rounded once to float32 (see ``optimizers.single_rounding``)."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def inverse_root(x: Tensor) -> Tensor:
    """Return one over the root, with a Newton step in float64 from the rounded root."""
    wide = x.to(torch.float64)
    estimate = 1.0 / root(x).to(torch.float64)
    return estimate.mul(1.5 - (wide * 0.5) * (estimate * estimate)).to(torch.float32)


def _turn(x: Tensor, quarter: int) -> Tensor:
    n = (x * (2 / math.pi)).round_()
    r = x.sub(n * 1.5707963267341256).sub_(n * 6.077100506506192e-11)
    square = r * r
    sine, cosine = _sum_powers(square, _SINE).mul_(r), _sum_powers(square, _COSINE)
    place = (n.to(torch.int64) + quarter) & 3
    value = torch.where((place & 1) == 1, cosine, sine)
    return torch.where(place >= 2, -value, value)


def sin(x: Tensor) -> Tensor:
    """Return the sine; angles to about a million lose no bit of float32."""
    return _in_blocks(x, lambda block: _turn(block, 0))


def cos(x: Tensor) -> Tensor:
    """Return the cosine, as `sin`."""
    return _in_blocks(x, lambda block: _turn(block, 1))


def sigmoid(x: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-x))``."""
    return _in_blocks(x, lambda block: 1.0 / exp_block(-block).add_(1.0), torch.float32)


def _tanh(x: Tensor) -> Tensor:
    power = _wide_exp(x.clamp(-20.0, 20.0) * 2.0)
    return (power - 1.0) / (power + 1.0)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return _in_blocks(x, _tanh)


def _erf(x: Tensor) -> Tensor:
    """In float64, to about 1e-9: a series up to 2, a continued fraction beyond.

    Source: Abramowitz and Stegun 1964, 7.1.5 and 7.1.14.
    """
    size = x.abs().clamp_(max=6.0)
    value = _sum_powers(size * size, _ERF_SERIES).mul_(size).mul_(2.0 / math.sqrt(math.pi))
    is_far = size > 2.0
    far = size[is_far]
    fraction = far
    for numerator in range(24, 0, -1):
        fraction = far + (numerator / 2.0) / fraction
    value[is_far] = 1.0 - _wide_exp(-(far * far)) / (fraction * math.sqrt(math.pi))
    return torch.where(x < 0, -value, value)


def erf(x: Tensor) -> Tensor:
    """Return the error function."""
    return _in_blocks(x, _erf)


def _inverse_erf(x: Tensor) -> Tensor:
    """In float64, to about 3e-7. Source: Giles 2010, "Approximating the erfinv function", single precision."""
    w = -_log((1.0 - x) * (1.0 + x))
    value = _sum_powers(w - 2.5, _INVERSE_ERF_MIDDLE)
    is_tail = w >= 5.0
    far = w[is_tail].to(torch.float32)
    value[is_tail] = _sum_powers(root(far).to(torch.float64).sub_(3.0), _INVERSE_ERF_TAIL)
    return value.mul_(x)


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw float64 numbers inside (0, 1), odd multiples of 2**-53, from integers of a generator on the CPU."""
    bits = torch.empty(shape, dtype=torch.int64, device="cpu").random_(0, 2**52, generator=generator)
    return bits.to(torch.float64).mul_(2.0**-52).add_(2.0**-53)


def draw_normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw float32 numbers of a standard normal distribution: the inverse of its distribution function.

    Guarantees:
        A generator's seed decides every bit, on any processor. torch's ``normal_`` draws other bits with vectors than
        without.
    """
    flat = torch.empty(shape, dtype=torch.float32, device="cpu").view(-1)
    for first in range(0, flat.numel(), _BLOCK):
        block = flat[first : first + _BLOCK]
        uniform = draw_uniform((block.numel(),), generator)
        block.copy_(_inverse_erf(uniform.mul_(2.0).sub_(1.0)).mul_(math.sqrt(2.0)))
    return flat.view(shape)


def exact_sum(x: Tensor, dims: tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    """Add float32 numbers up as integers, rounded to float32 once.

    Each is first rounded to a multiple of a power of two, chosen by the greatest of its sum: sums of n have
    ``52 - log2(n)`` bits, so float64 adds them without an error in whatever order.
    """
    if x.numel() == 0:
        return x.sum(dims, keepdim=keepdim)
    num_terms = math.prod(x.shape[dim] for dim in dims)
    bits = 52 - max(1, num_terms - 1).bit_length()
    greatest = x.abs().amax(dims, keepdim=True).clamp_(min=2.0**-100)
    exponent = exponent_above(greatest)
    total = (x.to(torch.float64) * power_of_two(bits - exponent)).round_().sum(dims, keepdim=True)
    # + 0.0: one library leaves a sum of negative zeros negative, another does not
    result = (total * power_of_two(exponent - bits)).to(torch.float32).add_(0.0)
    # of an infinite or undefined term there is no multiple
    result = torch.where(torch.isfinite(greatest), result, math.nan)
    if keepdim:
        return result
    outer_shape = [size for dim, size in enumerate(x.shape) if dim not in {d % x.dim() for d in dims}]
    return result.reshape(outer_shape)


def rounded_cosine(angle: float) -> float:
    """Return the cosine of an angle from 0 to pi by a series of float64 operations, to about 1e-15."""
    is_far = angle > math.pi / 2
    near = math.pi - angle if is_far else angle
    total = 0.0
    for n in range(14, -1, -1):
        total = total * (near * near) + (-1) ** n / math.factorial(2 * n)
    return -total if is_far else total
