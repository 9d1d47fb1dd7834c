"""The screen looks at every message before it is used. A hit convicts no party; it asks for an audit."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_FINITE = "not finite"
"""The one reason that is no statistic."""

_WARM_UP = 16
_DECAY = 0.95
_SIGMAS = 8.0
_LEAST_LOG_RATIO = math.log(4.0)
_LEAST_COSINE = -0.3


@dataclass
class _Average:
    """Exponential moving averages of one kind of message."""

    seen: int = 0
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

    def check(self, source: int, direction: str, tensor: Tensor) -> str | None:
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
        reason = self._compare(average, log_rms, channels)
        if reason is None:
            self._learn(average, log_rms, channels)
        return reason

    def _compare(self, average: _Average, log_rms: float, channels: Tensor | None) -> str | None:
        if average.seen < _WARM_UP:
            return None
        off = abs(log_rms - average.log_rms)
        if off > max(_LEAST_LOG_RATIO, _SIGMAS * math.sqrt(average.variance)):
            return f"norm is off its moving average by a factor of {math.exp(min(off, 99.0)):.1f}"
        if channels is not None and average.channels is not None:
            cosine = _cosine(channels, average.channels)
            if not cosine >= _LEAST_COSINE:
                return f"channel means point away from their moving average (cosine {cosine:.2f})"
        return None

    def _learn(self, average: _Average, log_rms: float, channels: Tensor | None) -> None:
        # until warmed up, the plain mean of what was seen
        weight = max(1 - _DECAY, 1 / (average.seen + 1))
        delta = log_rms - average.log_rms
        average.log_rms += weight * delta
        average.variance = (1 - weight) * (average.variance + weight * delta * delta)
        if channels is not None:
            average.channels = channels if average.channels is None else average.channels.lerp_(channels, weight)
        average.seen += 1


def _cosine(one: Tensor, other: Tensor) -> float:
    """Of two vectors; 0 where one has no direction."""
    lengths = float(torch.dot(one, one)) * float(torch.dot(other, other))
    return float(torch.dot(one, other)) / max(math.sqrt(lengths), 1e-30)
