"""Collectives that autograd sees: what goes one way forward goes the opposite way backward.

Every function here takes and returns ordinary tensors; all ranks of the group call it together.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.parallel.groups import direct

Group = dist.ProcessGroup


def enter(x: Tensor, group: Group) -> Tensor:
    """Hand equal tensors to ranks that each do a part of the work: identity, gradients are summed."""
    return _Enter.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: Tensor, group: Group) -> Tensor:
    """Sum the parts that ranks have computed; the gradient is passed on as it is."""
    return _Leave.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_parts(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join slices for ranks that each do a part of the work: gradients are summed, and sliced again."""
    return _GatherParts.apply(x, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum the parts that ranks have computed and keep one's own slice; gradients are joined."""
    return _ScatterSum.apply(x, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_copies(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join slices for ranks that all do the same work: one's own slice of the gradient is enough."""
    return _GatherCopies.apply(x, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def keep_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    """Keep one's own slice of a tensor that all ranks have; gradients are joined."""
    return _KeepSlice.apply(x, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def swap(x: Tensor, group: Group) -> Tensor:
    """Send part i of dimension 0 to rank i; part j of the result is from rank j."""
    return _Swap.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return direct.summed(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return direct.summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed_slice(gradient, ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _summed_slice(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradient, ctx.dim, ctx.group), None, None


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(gradient, ctx.dim, ctx.group), None, None


class _KeepSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_slice(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradient, ctx.dim, ctx.group), None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # equal parts make the exchange its own inverse
        return _swapped(gradient, ctx.group), None


def _joined(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    direct.gather(whole, first, group)
    return whole.movedim(0, dim).contiguous()


def _summed_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    part = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
    direct.scatter_sum(part, first, group)
    return part.movedim(0, dim).contiguous()


def _own_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _swapped(x: Tensor, group: Group) -> Tensor:
    came = x.contiguous()
    went = torch.empty_like(came)
    dist.all_to_all_single(went, came, group=group)
    return went
