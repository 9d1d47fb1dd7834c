"""Context parallel attention by exchange: each rank trades its slice of the sequence for some of the heads, and back.

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from phalanx.models import StageModule
from phalanx.parallel.exchange import Group, swap
from phalanx.parallel.tensor_plans import PLANS

_NAME = "phalanx_ulysses"
_GROUP = "phalanx_context"


def share_context(stage: StageModule, group: Group) -> None:
    """Let a stage's attention see the whole sequence although each rank has a slice of it.

    Args:
        stage: Of a family whose attention goes through transformers' registry; changed in place.
        group: The context parallel ranks; one alone changes nothing.
    """
    if group.size() == 1:
        return
    AttentionInterface.register(_NAME, _attend)
    stage.hub_config._attn_implementation = _NAME
    for block in stage.own_blocks:
        attention: Any = block.get_submodule(PLANS[stage.family.model_type].attention)
        setattr(attention, _GROUP, group)
        attention.config._attn_implementation = _NAME


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention over ``[batch, heads, seq / ranks, width]``, out ``[batch, seq / ranks, heads, width]``."""
    group: Group = getattr(module, _GROUP)
    whole = [_to_heads(x, group) for x in (query, key, value)]
    # no mask: rows are whole and causal, which the kernel knows by itself
    out, _ = sdpa_attention_forward(module, *whole, None, **options)
    return _to_sequence(out, group), None


def _to_heads(x: Tensor, group: Group) -> Tensor:
    batch, heads, part, width = x.shape
    ranks = group.size()
    dealt = x.reshape(batch, ranks, heads // ranks, part, width).permute(1, 0, 2, 3, 4)
    # by sender, which is by slice of the sequence
    came = swap(dealt, group).permute(1, 2, 0, 3, 4)
    return came.reshape(batch, heads // ranks, ranks * part, width)


def _to_sequence(x: Tensor, group: Group) -> Tensor:
    batch, length, heads, width = x.shape
    ranks = group.size()
    dealt = x.reshape(batch, ranks, length // ranks, heads, width).permute(1, 0, 2, 3, 4)
    # by sender, which is by heads
    came = swap(dealt, group).permute(1, 2, 0, 3, 4)
    return came.reshape(batch, length // ranks, ranks * heads, width)
