"""Look at a claimed weight gradient with one of its own microbatches in hand. A hit accuses nobody."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Doubt = Literal["direction", "largest", "size", "support"]
"""Why a claimed weight gradient looks odd:

- direction: it points away from the gradient of a microbatch that is in it
- largest: its largest numbers do, and the rest does not
- size: its norm is not one that so many microbatches add up to, or not a number
- support: it is zero where the microbatch's gradient is not
"""

_LEAST_COSINE = -0.2
_LEAST_CONTRAST = -0.5
_LARGE = 4.0
"""Numbers beyond so many root mean squares of their tensor are its largest ones."""
_FEWEST_LARGE = 8
"""Fewer of them say nothing."""
_MOST_LOG_RATIO = 0.9
_LEAST_LOG_RATIO = -1.5
"""Below what independent microbatches would add up to."""
_MOST_MISSING = 0.5


def doubt_about(claimed: Mapping[str, Tensor], own: Mapping[str, Tensor], num_microbatches: int) -> Doubt | None:
    """Compare a claimed sum of weight gradients with the gradient of one of its microbatches.

    Args:
        claimed: The sum over `num_microbatches`, by name.
        own: What this party computed for one of them, by the same names and in the same shapes.
        num_microbatches: How many the sum is made of.

    Returns:
        Why the sum should be recomputed; None when it looks like what it is said to be.

    Guarantees:
        NaN and infinity never pass. Nothing else is certain: microbatches of an honest sum may point away from it. In honest
        runs of four small models 0.8 to 3.7 of 100 sums were doubted; of reversed sums 64 to 92, of sums whose largest
        hundredth was reversed 69 to 90, of tenfold ones 80 to 100 (`benchmarks/gradient_screen.py`). Whoever changes a sum less is
        found by audits of whole steps alone.
    """
    inner, claimed_square, own_square = 0.0, 0.0, 0.0
    large_inner, large_claimed, large_own = 0.0, 0.0, 0.0
    missing, present, num_large = 0, 0, 0
    for name in sorted(own):
        g, total = own[name].detach().flatten().float(), claimed[name].detach().flatten().float()
        square = float(torch.dot(total, total))
        large = total.abs() > _LARGE * math.sqrt(square / max(total.numel(), 1)) if math.isfinite(square) else None
        inner += float(torch.dot(total, g))
        claimed_square += square
        own_square += float(torch.dot(g, g))
        if large is not None:
            some, mine = total[large], g[large]
            num_large += len(some)
            large_inner += float(torch.dot(some, mine))
            large_claimed += float(torch.dot(some, some))
            large_own += float(torch.dot(mine, mine))
        there = g != 0
        present += int(there.sum())
        missing += int((there & (total == 0)).sum())
    if not (math.isfinite(claimed_square) and math.isfinite(inner)):
        return "size"
    if not own_square:
        # a microbatch without a single target has nothing to compare with
        return None
    if missing > _MOST_MISSING * present:
        return "support"
    log_ratio = 0.5 * math.log(claimed_square / own_square) - math.log(num_microbatches)
    if not _LEAST_LOG_RATIO - 0.5 * math.log(num_microbatches) <= log_ratio <= _MOST_LOG_RATIO:
        return "size"
    if not _cosine(inner, claimed_square, own_square) >= _LEAST_COSINE:
        return "direction"
    rest = _cosine(inner - large_inner, claimed_square - large_claimed, own_square - large_own)
    if num_large >= _FEWEST_LARGE and not _cosine(large_inner, large_claimed, large_own) - rest >= _LEAST_CONTRAST:
        return "largest"
    return None


def _cosine(inner: float, one_square: float, other_square: float) -> float:
    """From an inner product and two squared norms; 0 where one has no direction."""
    square = one_square * other_square
    return inner / math.sqrt(square) if square > 0.0 else 0.0
