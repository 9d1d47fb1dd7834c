"""Parts between ranks on CPUs, sent straight to where they belong.

gloo gathers by way of a buffer of its own, and scatters sums by an all-reduce of a copy of everything. Here each rank
sends each other one its part: (n - 1) / n of the bytes, once, and nothing is copied. On other devices the library's own
collectives are taken.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

Group = dist.ProcessGroup

_PAIR = 2


def gather_whole(whole: Tensor, part: Tensor, group: Group) -> None:
    """Fill a tensor with the parts of all ranks.

    Args:
        whole: Contiguous, as many equal parts along dimension 0 as there are ranks.
        part: This rank's, contiguous; it may already lie in its place.
        group: The ranks; all of them call this together.
    """
    if whole.device.type != "cpu":
        dist.all_gather_into_tensor(whole, part, group=group)
        return
    places = whole.chunk(group.size())
    own_place = places[group.rank()]
    if own_place.data_ptr() != part.data_ptr():
        own_place.copy_(part)
    exchange_parts([own_place] * group.size(), places, group)


def scatter_sum(part: Tensor, whole: Tensor, group: Group) -> None:
    """Fill a tensor with this rank's part of the sum over all ranks.

    Args:
        part: Contiguous tensor that gets the result.
        whole: Contiguous summands; equal parts along dimension 0.
        group: The ranks; all of them call this together.
    """
    if whole.device.type != "cpu" or group.size() == 1:
        dist.reduce_scatter_tensor(part, whole, group=group)
        return
    parts = whole.chunk(group.size())
    came = [torch.empty_like(part) for _ in parts[1:]]
    places = [*came[: group.rank()], part, *came[group.rank() :]]
    exchange_parts(parts, places, group)
    torch.add(parts[group.rank()], came[0], out=part)
    for part_of_peer in came[1:]:
        part.add_(part_of_peer)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks as a new tensor, the same bits on each of them; all of them call this together."""
    # autograd, and a recomputation, may still need the tensor that came in
    if x.device.type != "cpu" or group.size() != _PAIR:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
    # between two, one exchange of the whole takes as many bytes as a ring and half of its rounds
    mine = x.contiguous()
    theirs = torch.empty_like(mine)
    exchange_parts([mine, mine], [theirs, theirs], group)
    return theirs.add_(mine)


class DirectGather:
    """`gather` as FSDP2 calls it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for gathered tensors."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> None:
        """Gather; it is done when this returns."""
        del async_op
        gather_whole(output_tensor, input_tensor, group)


class DirectScatter:
    """`scatter_sum` as FSDP2 calls it."""

    def sum_parts(self, part: Tensor, whole: Tensor, group: Group) -> None:
        """Fill a part with the sum over all ranks."""
        scatter_sum(part, whole, group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for summed tensors."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> None:
        """Sum or average, and scatter; it is done when this returns."""
        del async_op
        self.sum_parts(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def exchange_parts(sent: Sequence[Tensor], places: Sequence[Tensor], group: Group) -> None:
    """Send each other rank its tensor, and receive into the places of what others send; one's own is left alone."""
    rank, world = group.rank(), group.size()
    works: list[Any] = []
    # no rank is sent to by all at once
    for distance in range(1, world):
        ahead, behind = (rank + distance) % world, (rank - distance) % world
        works.append(dist.irecv(places[behind], group=group, group_src=behind))
        works.append(dist.isend(sent[ahead], group=group, group_dst=ahead))
    for work in works:
        work.wait()
