"""Attention of some queries over some of the keys, with what joins it to attention over the others.

A kernel gives the logarithm of each query's summed weights beside its output. Two outputs are joined by these, and with
the joined ones the same kernels give each block its part of the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.errors import ConfigError

_OPS = torch.ops.aten
_ALIGNED = 32
"""Queries by which the log-sum-exp of the kernel for GPUs is padded."""


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values, ``[batch, heads, seq, width]``; keys and values may have fewer heads, which divide.

    Attributes:
        causal: Query i sees keys 0 to i; else all see all.
        scale: Factor of the scores; None is one over the square root of the width.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    scale: float | None


def attend_block(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return the output, like the queries, and the log-sum-exp ``[batch, heads, seq]`` in float32 at least."""
    return _choose_kernels(heads.query)[0](heads)


def attention_gradients(heads: Heads, gradient: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of queries, keys and values.

    Args:
        heads: Queries, keys and values of the forward pass.
        gradient: Gradient of the output over all blocks that these queries see.
        sums: Log-sum-exp of the scores of that output.
    """
    return _choose_kernels(heads.query)[1](heads, gradient, out, sums)


def join_blocks(out: Tensor, sums: Tensor, block_out: Tensor, block_sums: Tensor) -> None:
    """Add attention over more keys to an output and its log-sum-exp, both changed in place and of the sums' type.

    Source: Liu et al. 2023, section 3; Milakov and Gimelshein 2018 for sums that go on.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_sums - sums).unsqueeze(-1))
    torch.logaddexp(sums, block_sums, out=sums)


def _attend_on_cpu(heads: Heads) -> tuple[Tensor, Tensor]:
    out, sums = _OPS._scaled_dot_product_flash_attention_for_cpu(
        heads.query, heads.key, heads.value, 0.0, heads.causal, scale=heads.scale
    )
    return out, sums


def _gradients_on_cpu(heads: Heads, gradient: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, heads.query, heads.key, heads.value, out, sums, 0.0, heads.causal, scale=heads.scale
    )
    return results


def _attend_on_gpu(heads: Heads) -> tuple[Tensor, Tensor]:
    """By the kernel that also takes float32."""
    out, sums, _, _ = _OPS._scaled_dot_product_efficient_attention(
        heads.query, _repeat_heads(heads.key, heads), _repeat_heads(heads.value, heads), None, True, 0.0, heads.causal,
        scale=heads.scale,
    )  # fmt: skip
    return out, sums[:, :, : heads.query.shape[2]]


def _gradients_on_gpu(heads: Heads, gradient: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # an infinite sum leaves a query that is not there without weights
    padded = functional.pad(sums, (0, -sums.shape[2] % _ALIGNED), value=torch.inf).contiguous()
    nothing = torch.zeros((), dtype=torch.int64, device=sums.device)
    query, key, value, _ = _OPS._scaled_dot_product_efficient_attention_backward(
        gradient, heads.query, _repeat_heads(heads.key, heads), _repeat_heads(heads.value, heads), None, out, padded,
        nothing, nothing, 0.0, [True, True, True, False], heads.causal, scale=heads.scale,
    )  # fmt: skip
    return query, _sum_heads(key, heads), _sum_heads(value, heads)


def _repeat_heads(shared: Tensor, heads: Heads) -> Tensor:
    times = heads.query.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, 1)


def _sum_heads(gradient: Tensor, heads: Heads) -> Tensor:
    """The gradient of heads that were repeated."""
    batch, shared, length, width = heads.key.shape
    if gradient.shape[1] == shared:
        return gradient
    return gradient.reshape(batch, shared, -1, length, width).sum(2)


_Attend = Callable[[Heads], tuple[Tensor, Tensor]]
_Gradients = Callable[[Heads, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
_KERNELS: dict[str, tuple[_Attend, _Gradients]] = {
    "cpu": (_attend_on_cpu, _gradients_on_cpu),
    "cuda": (_attend_on_gpu, _gradients_on_gpu),
}


def _choose_kernels(query: Tensor) -> tuple[_Attend, _Gradients]:
    device = query.device.type
    if device not in _KERNELS:
        raise ConfigError(f'ring attention has no kernel for {device}; set parallel.context to "ulysses"')
    return _KERNELS[device]
