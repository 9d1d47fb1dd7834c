"""Layers that tensor parallel ranks share, a loss over a shared vocabulary, and the plan of each family's blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from phalanx.objectives import IGNORE
from phalanx.parallel.groups.collectives import Group, enter, gather_parts, leave, scatter_sum
from phalanx.planner.model.families import FAMILIES


class RowLinear(nn.Module):
    """A linear layer with inputs that are spread over ranks; the sum of their products is what comes out.

    Args:
        weight: This rank's slice.
        bias: The whole one, or None; added once, after the sum.
        group: The ranks.
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
        total = scatter_sum(product, x.dim() - 2, self._group) if self._cuts_sequence else leave(product, self._group)
        return total if self.bias is None else total + self.bias


class RowEmbedding(nn.Module):
    """An embedding of which each rank has some rows; the rows that others have come from them.

    Args:
        weight: This rank's rows.
        group: The ranks.
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
        return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def entry_hook(group: Group, *, cuts_sequence: bool) -> Hook:
    """Return what a module's first input goes through before ranks share its work."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        # without the batch: some families flatten batch and sequence before their MLP
        x = gather_parts(x, x.dim() - 2, group) if cuts_sequence else enter(x, group)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    return hook


def local_parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of its own memory that is trained as another one is."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)


def shared_causal_lm(logits: Tensor, labels: Tensor, group: Group) -> Tensor:
    """Summed cross-entropy, as `phalanx.objectives.causal_lm` gives it, on every rank.

    Args:
        logits: This rank's columns, ``[batch, seq, vocab / ranks]``, any float type; the loss is taken in float32.
        labels: int64 ``[batch, seq]``; IGNORE where no loss is taken.
        group: The ranks, in the order of their columns.
    """
    width = logits.shape[-1]
    loss: Tensor = _SharedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.to(torch.float32).reshape(-1, width), labels.reshape(-1), group.rank() * width, group
    )
    return loss


class _SharedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: Group) -> Tensor:
        peak = logits.detach().max(dim=-1).values
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(1)
        weights = shifted.exp()
        is_here = (labels >= start) & (labels < start + logits.shape[1])
        column = (labels - start).clamp(0, logits.shape[1] - 1)
        own = torch.where(is_here, shifted.gather(1, column.unsqueeze(1)).squeeze(1), shifted.new_zeros(()))
        sums = torch.stack((weights.sum(dim=-1), own))
        dist.all_reduce(sums, group=group)
        counted = labels != IGNORE
        ctx.save_for_backward(weights / sums[0].unsqueeze(1), column, is_here, counted)
        losses = torch.where(counted, sums[0].log() - sums[1], sums.new_zeros(()))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, column, is_here, counted = ctx.saved_tensors
        result = torch.where(counted.unsqueeze(1), shares, shares.new_zeros(()))
        hits = (is_here & counted).to(result.dtype).unsqueeze(1)
        result = result.scatter_add(1, column.unsqueeze(1), -hits)
        return result * gradient, None, None, None


@dataclass(frozen=True)
class BlockPlan:
    """The shared matrices of one block.

    Attributes:
        columns: Linear layers of which each rank has some outputs, with the matrices that lie side by side in them.
        rows: Linear layers of which each rank has the inputs that belong to those; their outputs are summed.
        entries: Modules with a first input at which the shared work begins.
        attention: The module that knows its number of heads.
        per_head: Its attributes that are divided by the number of ranks.
    """

    columns: Mapping[str, int]
    rows: tuple[str, ...]
    entries: tuple[str, ...]
    attention: str
    per_head: tuple[str, ...]


def plan_of(family: str) -> BlockPlan:
    """How ranks share a block, from what the family's facts say of its matrices."""
    facts = FAMILIES[family]
    side_by_side = {"all": 1 if facts.heads_first else 3}
    columns = {name: side_by_side.get(width, 1) for name, feed, width in facts.matrices if feed in ("first", "second")}
    module_of = {feed: name.partition(".")[0] for name, feed, _ in reversed(facts.matrices)}
    return BlockPlan(
        columns=columns,
        rows=tuple(name for name, _, _ in facts.matrices if name not in columns),
        entries=(module_of["first"], module_of["second"]),
        attention=module_of["first"],
        per_head=facts.per_head,
    )
