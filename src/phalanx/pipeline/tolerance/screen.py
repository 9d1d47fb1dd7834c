"""The screen looks at every message before it is used. A hit convicts no party; it asks for an audit."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NOT_FINITE = "not finite"
"""The one reason that is no statistic."""

_WARM_UP = 16
_DECAY = 0.95
_SIGMAS = 8.0
_MIN_LOG_RATIO = math.log(4.0)
_MIN_COSINE = -0.3


@dataclass
class _Average:
    """Exponential moving averages of one kind of message."""

    num_seen: int = 0
    log_rms: float = 0.0
    variance: float = 0.0
    channels: Tensor | None = None


class Screen:
    """Finite values, and norms and channel means near their moving averages.

    Guarantees:
        NaN and infinity never pass. Finds gross lies (zero, scale, Gaussian, sign flip of activations)
        once it has warmed up. Does not find stale, small or well-shaped lies: audits do.

    Source: the statistics of Sentinel (arXiv 2603.03592); here a hit is checked by recomputation.
    """

    def __init__(self) -> None:
        self._averages: dict[tuple[int, str], _Average] = {}

    def check_message(self, source: int, direction: str, tensor: Tensor) -> str | None:
        """Check one message ``[batch, seq, dim]``.

        Returns:
            None when it may be used, else the reason for an audit.
        """
        # few and plain kernels: right after a microbatch each dispatch costs more than the arithmetic
        rms = float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(tensor.numel(), 1))
        if not math.isfinite(rms):
            return NOT_FINITE
        average = self._averages.setdefault((source, direction), _Average())
        channels = tensor.flatten(0, -2).mean(dim=0, dtype=torch.float32) if direction == "forward" else None
        log_rms = math.log(max(rms, 1e-30))
        reason = self._find_deviation(average, log_rms, channels)
        if reason is None:
            self._update_average(average, log_rms, channels)
        return reason

    def _find_deviation(self, average: _Average, log_rms: float, channels: Tensor | None) -> str | None:
        if average.num_seen < _WARM_UP:
            return None
        off = abs(log_rms - average.log_rms)
        if off > max(_MIN_LOG_RATIO, _SIGMAS * math.sqrt(average.variance)):
            return f"norm differs from its moving average by a factor of {math.exp(min(off, 99.0)):.1f}"
        if channels is not None and average.channels is not None:
            # of two vectors; 0 where one has no direction
            other = average.channels
            lengths = float(torch.dot(channels, channels)) * float(torch.dot(other, other))
            cosine = float(torch.dot(channels, other)) / max(math.sqrt(lengths), 1e-30)
            if not cosine >= _MIN_COSINE:
                return f"channel means point away from their moving average (cosine {cosine:.2f})"
        return None

    def _update_average(self, average: _Average, log_rms: float, channels: Tensor | None) -> None:
        # until warmed up, the plain mean of what was seen
        weight = max(1 - _DECAY, 1 / (average.num_seen + 1))
        delta = log_rms - average.log_rms
        average.log_rms += weight * delta
        average.variance = (1 - weight) * (average.variance + weight * delta * delta)
        if channels is not None:
            average.channels = channels if average.channels is None else average.channels.lerp_(channels, weight)
        average.num_seen += 1


Doubt = Literal["direction", "largest", "size", "support"]
"""Why a claimed weight gradient looks odd:

- direction: it points away from the gradient of a microbatch that is in it
- largest: its largest numbers do, and the rest does not
- size: its norm is not one that so many microbatches add up to, or not a number
- support: it is zero where the microbatch's gradient is not
"""

_MIN_GRADIENT_COSINE = -0.2
_MIN_CONTRAST = -0.5
_LARGE = 4.0
"""Numbers beyond so many root mean squares of their tensor are its largest ones."""
_FEWEST_LARGE = 8
"""Fewer of them say nothing."""
_MAX_LOG_RATIO = 0.9
_MIN_GRADIENT_LOG_RATIO = -1.5
"""Below what independent microbatches would add up to."""
DOUBTS_AT_ONCE = 16
"""Of one shadow about one stage, which are followed without a look at the rate."""
STEPS_PER_DOUBT = 8
"""Steps after which one more doubt is followed; honest shadows doubt one step in 20 to 40."""
_MAX_MISSING = 0.5
_DRAWN, _LOOKED_AT = 4, 2
"""One of so many numbers of a stage is in a drawn tensor; one of so many of a large drawn tensor is looked at."""
_SMALL = 65536
"""So many numbers of a stage or of a tensor are looked at in any case."""


@dataclass
class _Products:
    """Inner product and squared norms of two vectors, added up over tensors."""

    inner: float = 0.0
    claimed: float = 0.0
    own: float = 0.0
    numbers: int = 0

    def add_pair(self, claimed: Tensor, own: Tensor) -> None:
        self.inner += float(torch.dot(claimed, own))
        self.claimed += float(torch.dot(claimed, claimed))
        self.own += float(torch.dot(own, own))
        self.numbers += len(own)

    def without_part(self, part: "_Products") -> "_Products":
        """Return the products without a part."""
        own_norm = self.own - part.own
        return _Products(self.inner - part.inner, self.claimed - part.claimed, own_norm, self.numbers - part.numbers)

    @property
    def cosine_similarity(self) -> float:
        """0 where one of the two has no direction."""
        square = self.claimed * self.own
        return self.inner / math.sqrt(square) if square > 0.0 else 0.0


class DoubtBudget:
    """The number of a shadow's doubts that are followed, each with an audit of a whole step.

    A doubt with a cause convicts the stage, and this pair of stage and shadow ends. So what adds up here had none.

    Guarantees:
        In n attempts at steps at most `DOUBTS_AT_ONCE` + n / `STEPS_PER_DOUBT` doubts of one shadow about one stage are
            followed. Of a shadow that doubts in every step, one in `STEPS_PER_DOUBT` steps always is.
    """

    def __init__(self) -> None:
        self._spent: dict[tuple[int, str], int] = {}
        """In steps, by stage and shadow."""
        self._exhausted: set[tuple[int, str]] = set()

    def pass_step(self) -> None:
        """A step's audits are drawn."""
        self._spent = {pair: spent - 1 for pair, spent in self._spent.items() if spent > 1}

    def may_follow(self, stage: int, shadow: str) -> bool:
        """Count a doubt, if there is room for it; False where there is none."""
        pair, spent = (stage, shadow), self._spent.get((stage, shadow), 0)
        if spent > (DOUBTS_AT_ONCE - 1) * STEPS_PER_DOUBT:
            return False
        self._spent[pair] = spent + STEPS_PER_DOUBT
        self._exhausted.discard(pair)
        return True

    def is_first_unfollowed(self, stage: int, shadow: str) -> bool:
        """Whether this is the first doubt in a row that is not followed."""
        is_first = (stage, shadow) not in self._exhausted
        self._exhausted.add((stage, shadow))
        return is_first


def draw_tensors(sizes: Mapping[str, int]) -> frozenset[str]:
    """Draw tensors whose gradients are compared, so that an audit computes no others.

    Args:
        sizes: Numbers of each trained tensor, by name.

    Returns:
        Names of tensors with a quarter of all numbers or more; all where there are few. No other party can know them.
    """
    names, drawn, remaining = sorted(sizes), set[str](), max(sum(sizes.values()) / _DRAWN, _SMALL)
    while names and remaining > 0:
        name = names.pop(secrets.randbelow(len(names)))
        drawn.add(name)
        remaining -= sizes[name]
    return frozenset(drawn)


def doubt_about(claimed: Mapping[str, Tensor], own: Mapping[str, Tensor], num_microbatches: int) -> Doubt | None:
    """Compare a claimed sum of weight gradients with the gradient of one of its microbatches.

    Of a large tensor a window is compared; no other party can know its place.

    Args:
        claimed: The sum over `num_microbatches`, by name.
        own: This party's gradient of one of them, in the same shapes; what it lacks is not compared.
        num_microbatches: Number of microbatches in the sum.

    Returns:
        Reason for recomputing the sum; None when it looks plausible.

    Guarantees:
        NaN and infinity inside the window never pass. Nothing else is certain: microbatches of an honest sum may point
        away from it, and a party that changes a sum little is found by audits of whole steps alone. How often honest
        sums are doubted and gross lies are not is measured by `src/phalanx/lab/bench/alone/gradient_screen.py`.
    """
    all_products, large = _Products(), _Products()
    missing, present = 0, 0
    for name in sorted(own):
        place = _random_window(own[name].numel())
        g, total = (tensor.detach().flatten()[place].float() for tensor in (own[name], claimed[name]))
        all_products.add_pair(total, g)
        is_large = total.abs() > _LARGE * float(torch.linalg.vector_norm(total)) / math.sqrt(max(len(total), 1))
        large.add_pair(total[is_large], g[is_large])
        is_present = g != 0
        present += int(is_present.sum())
        missing += int((is_present & (total == 0)).sum())
    if not (math.isfinite(all_products.claimed) and math.isfinite(all_products.inner)):
        return "size"
    if not all_products.own:
        # a microbatch without a single target has nothing to compare with
        return None
    contrast = (
        large.cosine_similarity - all_products.without_part(large).cosine_similarity
        if large.numbers >= _FEWEST_LARGE
        else 0.0
    )
    odd: dict[Doubt, bool] = {
        "support": missing > _MAX_MISSING * present,
        "size": not _is_sum_of(num_microbatches, all_products.claimed / all_products.own),
        "direction": not all_products.cosine_similarity >= _MIN_GRADIENT_COSINE,
        "largest": not contrast >= _MIN_CONTRAST,
    }
    return next((doubt for doubt, is_odd in odd.items() if is_odd), None)


def _random_window(size: int) -> slice:
    """Where to look in a tensor of so many numbers."""
    length = max(_SMALL, size // _LOOKED_AT)
    if size <= length:
        return slice(None)
    start = secrets.randbelow(size - length + 1)
    return slice(start, start + length)


def _is_sum_of(num_microbatches: int, square_ratio: float) -> bool:
    """Whether so many microbatches can come to this many times the squared norm of one of them."""
    if not square_ratio > 0.0:
        return False
    log_ratio = 0.5 * math.log(square_ratio) - math.log(num_microbatches)
    return _MIN_GRADIENT_LOG_RATIO - 0.5 * math.log(num_microbatches) <= log_ratio <= _MAX_LOG_RATIO
