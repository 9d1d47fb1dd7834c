"""Layers that tensor parallel ranks share: rows of a matrix, rows of an embedding, and the way in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.parallel.groups.collectives import Group, copy_to_ranks, gather_parts, scatter_sum, sum_over_ranks


class RowLinear(nn.Module):
    """A linear layer with inputs that are spread over ranks; its output is the sum of their products.

    Args:
        bias: The whole one, or None; added once, after the sum.
        is_transposed: The weight is stored ``[in, out]``.
        cuts_sequence: Each rank keeps its slice of the sequence of the sum.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Group,
        *,
        is_transposed: bool,
        cuts_sequence: bool,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._group = group
        self._is_transposed = is_transposed
        self._cuts_sequence = cuts_sequence

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in / ranks]`` to ``[..., out]``, of which the sequence may be cut."""
        product = x @ self.weight if self._is_transposed else functional.linear(x, self.weight)
        total = (
            scatter_sum(product, x.dim() - 2, self._group)
            if self._cuts_sequence
            else sum_over_ranks(product, self._group)
        )
        return total if self.bias is None else total + self.bias


class RowEmbedding(nn.Module):
    """An embedding of which each rank has some rows; the rows that others have come from them.

    Args:
        padding_idx: Row of the whole table that gets no gradient from here, or None.
    """

    def __init__(self, weight: nn.Parameter, group: Group, padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight
        self._group = group
        self._start = group.rank() * weight.shape[0]
        local = None if padding_idx is None else padding_idx - self._start
        self._padding_idx = local if local is not None and 0 <= local < weight.shape[0] else None

    def forward(self, ids: Tensor) -> Tensor:
        """Look ids up, ``[batch, seq]`` to ``[batch, seq, width]``."""
        local = ids - self._start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, self._padding_idx)
        return sum_over_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def entry_hook(group: Group, *, cuts_sequence: bool) -> Hook:
    """Return a function for a module's first input, which prepares it before ranks share the module's work."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        # without the batch: some families flatten batch and sequence before their MLP
        x = gather_parts(x, x.dim() - 2, group) if cuts_sequence else copy_to_ranks(x, group)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    return hook


def local_parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of its own memory that is trained as another one is."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)
