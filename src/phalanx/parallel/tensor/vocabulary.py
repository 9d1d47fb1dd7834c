"""The loss of a head with a vocabulary that is spread over ranks; no rank ever has all logits."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.objectives import IGNORE
from phalanx.parallel.groups.collectives import Group


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
        target_weight = torch.where(is_here, shifted.gather(1, column.unsqueeze(1)).squeeze(1), shifted.new_zeros(()))
        sums = torch.stack((weights.sum(dim=-1), target_weight))
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
