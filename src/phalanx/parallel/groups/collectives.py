"""Collectives that autograd sees: what goes one way forward goes the opposite way backward.

Every function here takes and returns ordinary tensors; all ranks of the group call it together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.parallel.groups import direct

Group = dist.ProcessGroup
Exchange = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    """An exchange forward, and its opposite backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _exchange_tensors(x: Tensor, forth: Exchange, back: Exchange) -> Tensor:
    return _Exchange.apply(x, forth, back)  # type: ignore[no-any-return, no-untyped-call]


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Hand equal tensors to ranks that each do a part of the work: identity, gradients are summed."""
    return _exchange_tensors(
        x, lambda same: same.view_as(same), lambda gradient: direct.all_reduce_sum(gradient, group)
    )


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum the parts that ranks have computed; the gradient is passed on as it is."""
    return _exchange_tensors(x, lambda part: direct.all_reduce_sum(part, group), lambda gradient: gradient)


def gather_parts(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join slices for ranks that each do a part of the work: gradients are summed, and sliced again."""
    return _exchange_tensors(
        x, partial(_join_tensors, dim=dim, group=group), partial(_summed_slice, dim=dim, group=group)
    )


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum the parts that ranks have computed and keep one's own slice; gradients are joined."""
    return _exchange_tensors(
        x, partial(_summed_slice, dim=dim, group=group), partial(_join_tensors, dim=dim, group=group)
    )


def gather_copies(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join slices for ranks that all do the same work: one's own slice of the gradient is enough."""
    return _exchange_tensors(x, partial(_join_tensors, dim=dim, group=group), partial(_own_slice, dim=dim, group=group))


def keep_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    """Keep one's own slice of a tensor that all ranks have; gradients are joined."""
    return _exchange_tensors(x, partial(_own_slice, dim=dim, group=group), partial(_join_tensors, dim=dim, group=group))


def swap_parts(x: Tensor, group: Group) -> Tensor:
    """Send part i of dimension 0 to rank i; part j of the result is from rank j."""
    # equal parts make the exchange its own inverse
    return _exchange_tensors(x, partial(_swap_tensors, group=group), partial(_swap_tensors, group=group))


def _join_tensors(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    gathered = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    direct.gather_whole(gathered, first, group)
    return gathered.movedim(0, dim).contiguous()


def _summed_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    part = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
    direct.scatter_sum(part, first, group)
    return part.movedim(0, dim).contiguous()


def _own_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _swap_tensors(x: Tensor, group: Group) -> Tensor:
    came = x.contiguous()
    went = torch.empty_like(came)
    dist.all_to_all_single(went, came, group=group)
    return went
