"""The law of every operator of torch that a stage calls, forward and backward, and has other bits elsewhere.

To add one: a function with the operator's signature here, its arguments in ``tests/exact/operator_vectors.py``, and
the vectors written anew.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.exact import functions
from phalanx.exact.functions import exact_sum

Number = float | int
Multiply = Callable[[Tensor, Tensor], Tensor]

LAW: dict[Any, Callable[..., Any]] = {}
"""What stands for an operator of torch."""

aten = torch.ops.aten
_SQRT_HALF, _TANH_SCALE, _TANH_CUBE = 0.7071067811865476, 0.7978845608028654, 0.044715
_DENSITY = 0.3989422804014327

_Law = TypeVar("_Law", bound=Callable[..., Any])


def _law(*operators: Any) -> Callable[[_Law], _Law]:
    def enter(function: _Law) -> _Law:
        LAW.update(dict.fromkeys(operators, function))
        return function

    return enter


@_law(aten.mm.default, aten.bmm.default)
def _multiply_matrices(multiply: Multiply, left: Tensor, right: Tensor) -> Tensor:
    return multiply(left, right)


@_law(aten.addmm.default, aten.baddbmm.default)
def _add_product(
    multiply: Multiply, bias: Tensor, left: Tensor, right: Tensor, *, beta: Number = 1, alpha: Number = 1
) -> Tensor:
    product = multiply(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


PRODUCTS = {_multiply_matrices, _add_product}
"""Laws whose first argument is the product of two matrices, or of batches of them."""


def _map_rows(function: Callable[..., Tensor], dim: int, *tensors: Tensor) -> Tensor:
    """Apply a function of rows ``[rows, size]`` along a dimension, in blocks that stay in a core's cache."""
    moved = [tensor.movedim(dim, -1) for tensor in tensors]
    shape, size = moved[0].shape, max(1, moved[0].shape[-1])
    flat = [tensor.reshape(-1, size) for tensor in moved]
    rows = max(1, 2**15 // size)
    result = torch.empty_like(flat[0], memory_format=torch.contiguous_format)
    for first in range(0, len(result), rows):
        result[first : first + rows] = function(*(tensor[first : first + rows] for tensor in flat))
    return result.view(shape).movedim(-1, dim)


def _shift_and_exp(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x - max``, its exponential, and the sum of that, by rows."""
    shifted = x - x.amax(-1, keepdim=True)
    powers = functions.exp_block(shifted)
    bits = 51 - x.shape[-1].bit_length()
    total = (powers.to(torch.float64) * 2.0**bits).round_().sum(-1, keepdim=True)
    return shifted, powers, total * 2.0**-bits


@_law(aten._softmax.default)
def _compute_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    def rows(block: Tensor) -> Tensor:
        _, powers, total = _shift_and_exp(block)
        return powers / total.to(torch.float32)

    return _map_rows(rows, dim, x)


@_law(aten._softmax_backward_data.default)
def _differentiate_softmax(gradient: Tensor, result: Tensor, dim: int, input_dtype: Any = None) -> Tensor:
    def rows(gradient: Tensor, result: Tensor) -> Tensor:
        weighted = gradient * result
        return weighted - result * exact_sum(weighted, (-1,), keepdim=True)

    return _map_rows(rows, dim, gradient, result)


@_law(aten._log_softmax.default)
def _compute_log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    def rows(block: Tensor) -> Tensor:
        shifted, _, total = _shift_and_exp(block)
        return shifted - functions.log(total).to(torch.float32)

    return _map_rows(rows, dim, x)


@_law(aten._log_softmax_backward_data.default)
def _differentiate_log_softmax(gradient: Tensor, result: Tensor, dim: int, input_dtype: Any = None) -> Tensor:
    def rows(gradient: Tensor, result: Tensor) -> Tensor:
        return gradient - functions.exp_block(result) * exact_sum(gradient, (-1,), keepdim=True)

    return _map_rows(rows, dim, gradient, result)


@_law(aten.logsumexp.default)
def _compute_logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    if len(dim) != 1:
        raise ModelError(f"exact numerics: logsumexp over dimensions {list(dim)}; expected one")
    moved = x.movedim(dim[0], -1)
    _, _, total = _shift_and_exp(moved)
    result = moved.amax(-1, keepdim=True) + functions.log(total).to(torch.float32)
    return result.movedim(-1, dim[0]) if keepdim else result.squeeze(-1)


@_law(aten.native_layer_norm.default)
def _normalise_layer(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims, size = tuple(range(-len(shape), 0)), math.prod(shape)
    mean = _divide_numbers(exact_sum(x, dims, keepdim=True), size)
    centred = x - mean
    inverse = functions.inverse_root(_divide_numbers(exact_sum(centred * centred, dims, keepdim=True), size) + eps)
    result = centred * inverse
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, inverse


@_law(aten.native_layer_norm_backward.default)
def _differentiate_layer_norm(  # noqa: PLR0917 - the signature is torch's
    gradient: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims, size = tuple(range(-len(shape), 0)), math.prod(shape)
    rows = tuple(range(x.dim() - len(shape)))
    normed = (x - mean) * inverse
    inner = gradient if weight is None else gradient * weight
    first = _divide_numbers(exact_sum(inner, dims, keepdim=True), size)
    second = _divide_numbers(exact_sum(inner * normed, dims, keepdim=True), size)
    return (
        (inner - first - normed * second) * inverse if mask[0] else None,
        exact_sum(gradient * normed, rows) if mask[1] and weight is not None else None,
        exact_sum(gradient, rows) if mask[2] and bias is not None else None,
    )


@_law(aten.sum.default)
def _sum_all(x: Tensor, *, dtype: Any = None) -> Tensor:
    return _sum_dims(x, None, dtype=dtype)


@_law(aten.sum.dim_IntList)
def _sum_dims(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = tuple(dim) if dim else tuple(range(x.dim()))
    if not x.is_floating_point():
        return x.sum(dims, keepdim=keepdim, dtype=dtype)
    return exact_sum(x, dims, keepdim=keepdim) if dims else x.clone()


@_law(aten.mean.default)
def _average_all(x: Tensor, *, dtype: Any = None) -> Tensor:
    return _average_dims(x, None, dtype=dtype)


@_law(aten.mean.dim)
def _average_dims(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = tuple(dim) if dim else tuple(range(x.dim()))
    total = _sum_dims(x, dims, keepdim)
    return _divide_numbers(total, math.prod(x.shape[d] for d in dims))


@_law(aten.linalg_vector_norm.default)
def compute_norm(
    x: Tensor, ord: Number = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Return the Euclidean norm, the root of an exact sum; see ``torch.linalg.vector_norm``."""
    if ord != 2:
        raise ModelError(f"exact numerics: a norm of order {ord}; expected 2")
    greatest = x.abs().amax()
    scale = functions.power_of_two(functions.exponent_above(greatest.clamp(2.0**-100, 2.0**120))).to(torch.float32)
    scaled = x / scale
    return functions.root(_sum_dims(scaled * scaled, dim, keepdim)) * scale


def _add_whole_numbers(values: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Round to integers of at most 52 bits in any sum, let `gather` add them in float64, and scale back to float32."""
    if not values.numel():
        return gather(values.to(torch.float64)).to(torch.float32)
    greatest = values.abs().amax()
    exponent = functions.exponent_above(greatest.clamp(min=2.0**-100))
    bits = 52 - max(1, values.numel() - 1).bit_length()
    total = gather((values.to(torch.float64) * functions.power_of_two(bits - exponent)).round_())
    result = (total * functions.power_of_two(exponent - bits)).to(torch.float32)
    return torch.where(torch.isfinite(greatest), result, math.nan)


@_law(aten.embedding_dense_backward.default)
def _differentiate_embedding(
    gradient: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    width = gradient.shape[-1]
    values, flat = gradient.reshape(-1, width), indices.reshape(-1)
    if padding_idx >= 0:
        values, flat = values[flat != padding_idx], flat[flat != padding_idx]
    rows, places = torch.unique(flat, return_inverse=True)
    result = torch.zeros(num_weights, width, device=gradient.device)
    result[rows] = _add_whole_numbers(
        values, lambda whole: whole.new_zeros(len(rows), width).index_add_(0, places, whole)
    )
    return result


@_law(aten.index_put.default)
def _put_values(base: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    if not accumulate or not base.is_floating_point():
        return torch.index_put(base, tuple(indices), values, accumulate=accumulate)
    chosen = tuple(slice(None) if index is None else index for index in indices)
    places = torch.arange(base.numel(), device=base.device).view(base.shape)[chosen]
    flat = values.expand(places.shape).reshape(-1)
    total = _add_whole_numbers(
        flat, lambda whole: whole.new_zeros(base.numel()).index_add_(0, places.reshape(-1), whole)
    )
    return base + total.view(base.shape)


@_law(aten.index_put_.default)
def _put_in_place(base: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    return base.copy_(_put_values(base, indices, values, accumulate))


@_law(aten.scatter_add.default)
def _scatter_sums(base: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    total = _add_whole_numbers(source, lambda whole: whole.new_zeros(base.shape).scatter_add_(dim, index, whole))
    return base + total


@_law(aten.index_add.default)
def _add_rows(base: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    total = _add_whole_numbers(source, lambda whole: whole.new_zeros(base.shape).index_add_(dim, index, whole))
    return base + (total if alpha == 1 else total * alpha)


@_law(aten.nll_loss_forward.default)
def _compute_nll_loss(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    if weight is not None:
        raise ModelError("exact numerics: weights of classes in a loss; leave them out")
    counts = target != ignore_index
    picked = -scores.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.where(counts, picked, 0.0)
    total = counts.sum().to(scores.dtype)
    if reduction == 0:
        return losses, torch.zeros_like(total)
    loss_sum = _sum_all(losses)
    return (loss_sum if reduction == 2 else loss_sum / total), total


@_law(aten.div.Tensor, aten.div.Scalar)
def _divide_numbers(x: Tensor, y: Tensor | Number) -> Tensor:
    # by a plain number a GPU multiplies by its inverse
    if not x.is_cuda or (isinstance(y, Tensor) and y.dim()):
        return torch.div(x, y)
    return torch.div(x, torch.as_tensor(y, dtype=x.dtype, device=x.device).reshape(1))


@_law(aten.add.Tensor, aten.add.Scalar)
def _add_numbers(x: Tensor, y: Tensor | Number, alpha: Number = 1) -> Tensor:
    return torch.add(x, y if alpha == 1 else y * alpha)


@_law(aten.sub.Tensor, aten.sub.Scalar)
def _subtract_numbers(x: Tensor, y: Tensor | Number, alpha: Number = 1) -> Tensor:
    return torch.sub(x, y if alpha == 1 else y * alpha)


@_law(aten.rsub.Scalar)
def _subtract_from_number(x: Tensor, y: Number, alpha: Number = 1) -> Tensor:
    return y - (x if alpha == 1 else x * alpha)


@_law(aten.add_.Tensor)
def _add_in_place(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    return x.add_(y if alpha == 1 else y * alpha)


@_law(aten.addcmul.default)
def _add_scaled_product(x: Tensor, first: Tensor, second: Tensor, *, value: Number = 1) -> Tensor:
    product = first * second
    return x + (product if value == 1 else product * value)


@_law(aten.reciprocal.default)
def _invert_numbers(x: Tensor) -> Tensor:
    return 1.0 / x


@_law(aten.pow.Tensor_Scalar)
def _raise_tensor(x: Tensor, exponent: Number) -> Tensor:
    if exponent == int(exponent):
        return functions.integer_power(x, int(exponent))
    if exponent == 0.5:
        return functions.root(x)
    if exponent == -0.5:
        return functions.inverse_root(x)
    return functions.power(x, torch.tensor(float(exponent))).to(x.dtype)


@_law(aten.pow.Scalar)
def _raise_number(base: Number, exponent: Tensor) -> Tensor:
    return functions.power(torch.tensor(float(base)), exponent).to(torch.float32)


@_law(aten.pow.Tensor_Tensor)
def _raise_tensors(base: Tensor, exponent: Tensor) -> Tensor:
    return functions.power(base, exponent).to(torch.promote_types(base.dtype, torch.float32))


@_law(aten.sigmoid_backward.default)
def _differentiate_sigmoid(gradient: Tensor, result: Tensor) -> Tensor:
    return gradient * (result * (1.0 - result))


@_law(aten.tanh_backward.default)
def _differentiate_tanh(gradient: Tensor, result: Tensor) -> Tensor:
    return gradient * (1.0 - result * result)


@_law(aten.silu.default)
def _compute_silu(x: Tensor) -> Tensor:
    return x * functions.sigmoid(x)


@_law(aten.silu_backward.default)
def _differentiate_silu(gradient: Tensor, x: Tensor) -> Tensor:
    gate = functions.sigmoid(x)
    return gradient * (gate * ((1.0 - gate).mul_(x).add_(1.0)))


@_law(aten.gelu.default)
def _compute_gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return (x * 0.5) * (functions.erf(x * _SQRT_HALF) + 1.0)
    return (x * 0.5) * (functions.tanh((x + (x * x * x) * _TANH_CUBE) * _TANH_SCALE) + 1.0)


@_law(aten.gelu_backward.default)
def _differentiate_gelu(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    square = x * x
    if approximate == "none":
        share = (functions.erf(x * _SQRT_HALF) + 1.0) * 0.5
        return gradient * (share + x * (functions.exp(square * -0.5) * _DENSITY))
    bent = functions.tanh((x + (square * x) * _TANH_CUBE) * _TANH_SCALE)
    slope = (square * (3.0 * _TANH_CUBE) + 1.0) * _TANH_SCALE
    return gradient * ((bent + 1.0) * 0.5 + (x * 0.5) * ((1.0 - bent * bent) * slope))


@_law(aten.log_sigmoid_forward.default)
def _compute_log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(max=0.0) - functions.log(functions.exp(-x.abs()) + 1.0), torch.empty(0, device=x.device)


@_law(aten.log_sigmoid_backward.default)
def _differentiate_log_sigmoid(gradient: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return gradient * functions.sigmoid(-x)


@_law(aten.softplus.default)
def _compute_softplus(x: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    scaled = x * beta
    smooth = (scaled.clamp(min=0.0) + functions.log(functions.exp(-scaled.abs()) + 1.0)) / beta
    return torch.where(scaled > threshold, x, smooth)


@_law(aten.softplus_backward.default)
def _differentiate_softplus(gradient: Tensor, x: Tensor, beta: Number, threshold: Number) -> Tensor:
    return torch.where(x * beta > threshold, gradient, gradient * functions.sigmoid(x * beta))


@_law(aten.bernoulli_.float)
def _draw_bernoulli(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    return x.copy_(functions.draw_uniform(tuple(x.shape), generator) < p)


@_law(aten.uniform_.default)
def _draw_uniform(
    x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return x.copy_(functions.draw_uniform(tuple(x.shape), generator).mul_(high - low).add_(low))


@_law(aten.normal_.default)
def _draw_normal(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    return x.copy_(functions.draw_normal(tuple(x.shape), generator).mul_(std).add_(mean))


LAW.update(
    {
        aten.exp.default: functions.exp,
        aten.expm1.default: functions.expm1,
        aten.log.default: functions.log,
        aten.sin.default: functions.sin,
        aten.cos.default: functions.cos,
        aten.tanh.default: functions.tanh,
        aten.erf.default: functions.erf,
        aten.sigmoid.default: functions.sigmoid,
        aten.sqrt.default: functions.root,
        aten.rsqrt.default: functions.inverse_root,
    }
)
