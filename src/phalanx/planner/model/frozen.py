"""The activations that a block still keeps for its backward pass where its own weights are frozen."""

from dataclasses import replace

from phalanx.planner.model.adapter import Adapter, adapted
from phalanx.planner.model.families import Feed
from phalanx.planner.model.saved_activations import SavedPerToken
from phalanx.planner.model.shape import ModelShape

_NORMS = 2
_DROPPED = 2
"""Tensors of an adapter's own that dropping inputs leaves: which ones, and what is left of them."""


def beside_frozen(
    kept: SavedPerToken, shape: ModelShape, adapter: Adapter, *, is_fused: bool, inner: int
) -> SavedPerToken:
    """Return what is left of what a block keeps.

    What a frozen matrix multiplies is kept for its gradient alone, and so is not; but for what an adapter multiplies as
    well, and for what something else needs: a fused kernel its own result, relu likewise. A norm's frozen scale needs
    its input and not what it scales.

    Args:
        kept: With all weights trained.
        shape: The model.
        adapter: What is trained instead.
        is_fused: Attention is one kernel.
        inner: Tensors of the MLP's inner width among what is kept.
    """
    widths: dict[Feed, int] = {
        "first": shape.hidden,
        "second": shape.hidden,
        "mixed": 0 if is_fused else shape.heads * shape.head_dim,
        "inner": shape.ffn if inner > 1 else 0,
    }
    needed: dict[Feed, int] = dict.fromkeys(widths, 0)
    targets = adapted(shape, adapter)
    for one in targets:
        needed[one.feed] = needed[one.feed] + _DROPPED * one.inputs if adapter.drops else widths[one.feed]
    return replace(
        kept,
        stream=_NORMS * shape.hidden,
        whole=needed["first"] + needed["second"] + adapter.rank * len(targets),
        split=kept.split - widths["mixed"] - widths["inner"] + needed["mixed"] + needed["inner"],
    )
