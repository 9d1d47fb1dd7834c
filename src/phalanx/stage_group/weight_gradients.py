"""Whole weight gradients of a group's ranks, added up in the order of the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.parallel.data.parameters import RankParameter, join_parameter
from phalanx.parallel.groups.direct import all_reduce_sum
from phalanx.parallel.groups.mesh import Domain

Slices = Mapping[str, Tensor]
"""A runner's slices of the weight gradients, by name."""


class WeightGradients(Protocol):
    """The sum of a stage's weight gradients over the ranks of a group."""

    def hand_back(self) -> None:
        """Put the sums that are kept here where a runner looks for them."""

    def collect_sums(self, slices: Slices) -> dict[str, Tensor]:
        """Bring whole sums to rank 0, on the CPU; all ranks call this together, and rank 0 alone has all of them.

        Args:
            slices: This rank's slices of the sums, by its runner.
        """

    def clear_sums(self) -> None:
        """Forget the sums of a step that will be done again."""


class JoinedGradients:
    """Each rank adds up the gradients of its own rows and positions; rank 0 adds the ranks' sums at the end."""

    def __init__(self, held: Sequence[RankParameter], domain: Domain) -> None:
        self._held = held
        self._domain = domain

    def hand_back(self) -> None:
        """A runner has them anyway."""

    def collect_sums(self, slices: Slices) -> dict[str, Tensor]:
        """As `WeightGradients.collect_sums`."""
        domain = self._domain
        totals = {}
        for entry in self._held:
            total = join_parameter(entry, _complete_gradient(entry, slices[entry.name], domain), domain)
            if domain.tp == 0:
                total = ordered_sum(total, domain, 0)
            if dist.get_rank() == 0:
                totals[entry.name] = total
        return totals

    def clear_sums(self) -> None:
        """Nothing is kept here."""


class SharedGradients:
    """Each sum is at one of the copies alone, and is added to while the backward pass runs (ZeRO 2).

    A rank holds the gradients of one parameter after the other, and the sums that it is the keeper of.

    Args:
        held: This rank's parameters; each gets a hook.
    """

    def __init__(self, held: Sequence[RankParameter], domain: Domain) -> None:
        self._held = held
        self._domain = domain
        self._sums: dict[str, Tensor] = {}
        for entry, keeper in self._list_keepers():
            parameter: Any = entry.parameter
            parameter.register_post_accumulate_grad_hook(self._make_hook(entry.name, keeper))

    def hand_back(self) -> None:
        """As `WeightGradients.hand_back`."""
        for entry, _ in self._list_keepers():
            entry.parameter.grad = self._sums.pop(entry.name, None)

    def collect_sums(self, slices: Slices) -> dict[str, Tensor]:
        """As `WeightGradients.collect_sums`."""
        domain = self._domain
        totals = {}
        for entry, keeper in self._list_keepers():
            if domain.copy_index == keeper:
                totals[entry.name] = join_parameter(
                    entry, _complete_gradient(entry, slices[entry.name], domain), domain
                )
                if domain.tp == 0 and keeper > 0:
                    dist.send(totals[entry.name].to(domain.device), dst=0)
            elif dist.get_rank() == 0:
                totals[entry.name] = self._receive_sum(entry, keeper)
        return totals

    def clear_sums(self) -> None:
        """As `WeightGradients.clear_sums`."""
        self._sums.clear()

    def _make_hook(self, name: str, keeper: int) -> Callable[[Tensor], None]:
        def give(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            total = ordered_sum(gradient, self._domain, keeper)
            if self._domain.copy_index == keeper:
                self._sums[name] = total if name not in self._sums else self._sums[name].add_(total)

        return give

    def _list_keepers(self) -> Iterator[tuple[RankParameter, int]]:
        for number, entry in enumerate(self._held):
            yield entry, number % self._domain.config.num_copies

    def _receive_sum(self, one: RankParameter, keeper: int) -> Tensor:
        came = torch.empty(whole_shape(one, self._domain), dtype=one.parameter.dtype, device=self._domain.device)
        dist.recv(came, src=keeper * self._domain.config.tp)
        return came.cpu()


def whole_shape(one: RankParameter, domain: Domain) -> tuple[int, ...]:
    """Shape of a parameter that tensor parallel ranks may have cut."""
    shape = list(one.parameter.shape)
    if one.split is not None:
        shape[one.split.dim] *= domain.config.tp
    return tuple(shape)


def ordered_sum(part: Tensor, domain: Domain, keeper: int) -> Tensor:
    """Add the copies' parts, in their order, at one of them; all copies call this together.

    Args:
        part: This copy's; changed where it is the first one's.
        keeper: Number of the copy that gets the sum.

    Returns:
        The sum at the keeper; elsewhere the unchanged part.
    """
    group, copies = domain.copies, domain.config.num_copies
    if copies == 1:
        return part
    mine = part.to(domain.device).contiguous()
    if domain.copy_index != keeper:
        dist.send(mine, group=group, group_dst=keeper)
        return part
    parts = [mine if copy == keeper else torch.empty_like(mine) for copy in range(copies)]
    for copy in range(copies):
        if copy != keeper:
            dist.recv(parts[copy], group=group, group_src=copy)
    total = parts[0]
    for other in parts[1:]:
        total = total + other
    return total.to(part.device)


def _complete_gradient(one: RankParameter, gradient: Tensor, domain: Domain) -> Tensor:
    """Sum of what tensor parallel ranks have, where each saw a part of the sequence."""
    return all_reduce_sum(gradient, domain.tensors) if one.is_partial else gradient
