"""Context parallel attention by exchange: each rank trades its slice of the sequence for some of the heads, and back.

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from phalanx.models import StageModule
from phalanx.parallel.groups.collectives import Group, swap_parts
from phalanx.parallel.tensor.tensor_plans import plan_of
from phalanx.planner.model.families import FAMILIES

_NAME = "phalanx_ulysses"
_GROUP = "phalanx_context"
_IS_PLAIN = "phalanx_plain"


def share_context(stage: StageModule, group: Group) -> None:
    """Let a stage's attention see the whole sequence although each rank has a slice of it.

    Args:
        stage: Changed in place. Attention goes through transformers' registry, but for biased scores, as bloom
            has them: that is a part of its own.
        group: The context parallel ranks; one alone changes nothing.
    """
    if group.size() == 1:
        return
    AttentionInterface.register(_NAME, _ulysses_attend)
    is_plain = stage.hub_config._attn_implementation == "eager"
    for block in stage.own_blocks:
        attention: Any = block.get_submodule(plan_of(stage.family.model_type).attention)
        if FAMILIES[stage.family.model_type].biased_scores:
            attention.forward = functools.partial(_attend_with_bias, attention, group)
            continue
        setattr(attention, _GROUP, group)
        setattr(attention, _IS_PLAIN, is_plain)
        attention.config._attn_implementation = _NAME
    stage.hub_config._attn_implementation = _NAME


def _ulysses_attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention over ``[batch, heads, seq / ranks, width]``, out ``[batch, seq / ranks, heads, width]``.

    The mask is of whole rows; without one attention is causal.
    """
    group: Group = getattr(module, _GROUP)
    heads = [_to_heads(x, group) for x in (query, key, value)]
    # a run with eager attention wants no fused kernel
    plain = sdpa_kernel(SDPBackend.MATH) if getattr(module, _IS_PLAIN) else contextlib.nullcontext()
    with plain:
        # rows are whole: without a mask they are causal, which the kernel knows by itself
        out, _ = sdpa_attention_forward(module, *heads, mask, **options)
    return _to_sequence(out, group), None


def _attend_with_bias(
    module: Any, group: Group, hidden: Tensor, residual: Tensor, alibi: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Bloom's attention, from ``[batch, seq / ranks, hidden]`` to the same, the residual added.

    Its linear bias, ``[batch * heads, 1, seq]``, is for all heads that the ranks have together.
    """
    query, key, value = [_to_heads(x, group) for x in module._reshape(module.query_key_value(hidden))]
    length = alibi.shape[-1]
    # alike for all rows
    heads = alibi.view(hidden.shape[0], -1, 1, length)[:1].chunk(group.size(), 1)[group.rank()]
    future = heads.new_full((length, length), -torch.inf).triu(1)
    dropout = module.attention_dropout.p if module.training else 0.0
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=(heads + future).to(query.dtype),
        dropout_p=dropout,
        scale=module.inv_norm_factor,
    )
    joined = module.dense(_to_sequence(out.transpose(1, 2), group).flatten(2))
    return residual + functional.dropout(joined, module.hidden_dropout, module.training), None


def _to_heads(x: Tensor, group: Group) -> Tensor:
    batch, heads, part, width = x.shape
    ranks = group.size()
    dealt = x.reshape(batch, ranks, heads // ranks, part, width).permute(1, 0, 2, 3, 4)
    # by sender, which is by slice of the sequence
    came = swap_parts(dealt, group).permute(1, 2, 0, 3, 4)
    return came.reshape(batch, heads // ranks, ranks * part, width)


def _to_sequence(x: Tensor, group: Group) -> Tensor:
    batch, length, heads, width = x.shape
    ranks = group.size()
    dealt = x.reshape(batch, ranks, length // ranks, heads, width).permute(1, 0, 2, 3, 4)
    # by sender, which is by heads
    came = swap_parts(dealt, group).permute(1, 2, 0, 3, 4)
    return came.reshape(batch, length // ranks, ranks * heads, width)
