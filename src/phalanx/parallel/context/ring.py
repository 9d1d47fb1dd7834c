"""Context parallel attention in a ring: each rank keeps its queries, keys and values go round, and nothing is whole.

What comes next is under way while the block at hand is computed. Positions lie as `own_positions` deals them out, so
that in every round all ranks have half of all pairs of their queries and the keys at hand to compute.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from transformers import AttentionInterface

from phalanx.errors import ConfigError
from phalanx.models import StageModule
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.context.attention_block import Heads, attend_block, attention_gradients, join_blocks
from phalanx.parallel.groups.collectives import Group
from phalanx.parallel.tensor.tensor_plans import plan_of

_NAME = "phalanx_ring"
_GROUP = "phalanx_context"


def share_by_ring(stage: StageModule, group: Group) -> None:
    """Let a stage's attention see the whole sequence although each rank has some chunks of it.

    Args:
        stage: Stage of a family whose attention adds nothing to scores; changed in place, by transformers' registry.
        group: The context parallel ranks; one alone changes nothing.
    """
    if group.size() == 1:
        return
    AttentionInterface.register(_NAME, _ring_attend)
    for block in stage.own_blocks:
        attention: Any = block.get_submodule(plan_of(stage.family.model_type).attention)
        setattr(attention, _GROUP, group)
        attention.config._attn_implementation = _NAME
    stage.hub_config._attn_implementation = _NAME


def ring_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, group: Group) -> Tensor:
    """Causal attention over the positions of all ranks; all of them call this together.

    Args:
        query: ``[batch, heads, seq / ranks, width]``: an earlier chunk of the sequence, then a later one.
        key: Like the queries; may have fewer heads, which divide the queries' number.
        scale: Factor of the scores; None is one over the square root of the width.

    Returns:
        ``[batch, heads, seq / ranks, width]`` in the queries' type. Parts are joined, and gradients added up, in
        float32 at least.
    """
    out: Tensor = _ring_forward(query, key, value, scale, group.group_name)[0]
    return out


def _ring_attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it; out ``[batch, seq / ranks, heads, width]``."""
    del mask
    if options.get("dropout"):
        raise ConfigError('ring attention drops nothing; set its dropout to 0, or parallel.context to "ulysses"')
    device = query.device.type
    if torch.is_autocast_enabled(device):
        narrow = torch.get_autocast_dtype(device)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    out = ring_attention(query, key, value, options.get("scaling"), getattr(module, _GROUP))
    return out.transpose(1, 2).contiguous(), None


# one operator, so that checkpointing can keep what it gives instead of sending everything again
@torch.library.custom_op("phalanx::ring_attention", mutates_args=())
def _ring_forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None, group: str) -> tuple[Tensor, Tensor]:
    return compute_ring_attention(query, key, value, scale, _resolve_process_group(GroupName(group)))


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(query, key, value, *output)


def _ring_backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    results = compute_ring_gradients(gradient, ctx.saved_tensors, ctx.scale, _resolve_process_group(ctx.group))
    return *results, None, None


_ring_forward.register_autograd(_ring_backward, setup_context=_save_context)
RING = torch.ops.phalanx.ring_attention.default
"""The operator that computes attention in a ring, as dispatching sees it."""


def compute_ring_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, group: Group
) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp; see `ring_attention`."""
    exact = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query, dtype=exact)
    sums = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)
    at_hand = torch.stack((key, value))
    for distance in range(group.size()):
        coming = _passed_on(at_hand, group, is_last=distance + 1 == group.size())
        queries, keys = _visible_slices(group, distance, query.shape[2])
        block = Heads(query[:, :, queries], at_hand[0][:, :, keys], at_hand[1][:, :, keys], distance == 0, scale)
        join_blocks(out[:, :, queries], sums[:, :, queries], *attend_block(block))
        at_hand = coming.await_tensor()
    return out.to(query.dtype), sums


def compute_ring_gradients(
    gradient: Tensor, kept: Sequence[Tensor], scale: float | None, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        kept: Queries, keys, values, output and log-sum-exp.
    """
    query, key, value, out, sums = kept
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    at_hand = torch.stack((key, value))
    of_queries = torch.zeros_like(query, dtype=sums.dtype)
    moving = _TensorInTransit(torch.zeros_like(at_hand, dtype=sums.dtype))
    for distance in range(group.size()):
        coming = _passed_on(at_hand, group, is_last=distance + 1 == group.size())
        queries, keys = _visible_slices(group, distance, query.shape[2])
        block = Heads(query[:, :, queries], at_hand[0][:, :, keys], at_hand[1][:, :, keys], distance == 0, scale)
        parts = attention_gradients(block, gradient[:, :, queries], out[:, :, queries], sums[:, :, queries])
        of_queries[:, :, queries] += parts[0]
        # what others have found about these keys follows the keys, and after the last round it is home
        of_hand = moving.await_tensor()
        of_hand[0][:, :, keys] += parts[1]
        of_hand[1][:, :, keys] += parts[2]
        moving = _passed_on(of_hand, group)
        at_hand = coming.await_tensor()
    of_key, of_value = moving.await_tensor()
    return of_queries.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _visible_slices(group: Group, distance: int, length: int) -> tuple[slice, slice]:
    """Return the slices of own queries and of received keys, from a rank so far behind, that see each other.

    One's own see each other causally. Of an earlier rank's keys all see the early chunk and none the late one; a later
    rank's are all behind one's early chunk and before one's late one.
    """
    if distance == 0:
        return slice(None), slice(None)
    if group.rank() >= distance:
        return slice(None), slice(length // 2)
    return slice(length // 2, None), slice(None)


@dataclass(frozen=True)
class _TensorInTransit:
    """A tensor that comes from the rank behind, and what must be waited for before it is there."""

    incoming: Tensor
    works: Sequence[Any] = ()

    def await_tensor(self) -> Tensor:
        """Wait for it, and until one's own may be forgotten."""
        for work in self.works:
            work.wait()
        return self.incoming


def _passed_on(x: Tensor, group: Group, *, is_last: bool = False) -> _TensorInTransit:
    """Begin to send a contiguous tensor ahead and to receive the one from behind; the last one stays where it is."""
    if is_last:
        return _TensorInTransit(x)
    rank, ranks = group.rank(), group.size()
    came = torch.empty_like(x)
    sending = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks)
    receiving = dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - 1) % ranks)
    return _TensorInTransit(came, dist.batch_isend_irecv([sending, receiving]))


def own_positions(whole: Tensor, dim: int, config: ParallelConfig, rank: int) -> Tensor:
    """Return a context parallel rank's part of a tensor with all positions of a sequence.

    Ulysses gives each rank a slice. In a ring the later half of a sequence would see most keys and the first rank would
    wait for the last: there a rank has one of twice as many chunks from the front, and its mirror image from the back.

    Args:
        whole: Any tensor; a table may have dimension 0 of size 1.
        dim: Dimension of the positions, which the ranks divide, in a ring twice.
    """
    if config.cp == 1:
        return whole
    if config.context == "ulysses":
        return whole.chunk(config.cp, dim)[rank]
    chunks = whole.chunk(2 * config.cp, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)
