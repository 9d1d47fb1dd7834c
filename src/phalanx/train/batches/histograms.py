"""Histograms of a model's weights, and of the running means of their gradients, from its state as it is saved."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from phalanx.checkpoint import Shard
from phalanx.telemetry import Histogram
from phalanx.telemetry.histogram import HistogramOf

_PARTS: dict[str, HistogramOf] = {"weight": "weights", "exp_avg": "gradients", "momentum_buffer": "gradients"}
"""What of a state is drawn. A gradient itself is a worker's word and is gone after its step; the optimizer's first
moment is part of the state that holder and shadow have signed."""


def histograms(shards: Iterable[Shard], bins: int) -> Iterator[Histogram]:
    """Yield a histogram of every parameter, and of its gradients' running mean where the optimizer keeps one.

    Args:
        shards: The state, one stage at a time.
    """
    for shard in shards:
        for key, tensor in shard.tensors.items():
            part, _, name = key.partition("/")
            if part in _PARTS:
                yield histogram_of(_PARTS[part], name, tensor, bins)


def histogram_of(of: HistogramOf, name: str, tensor: Tensor, bins: int) -> Histogram:
    """Return the histogram of one tensor; where all values are equal, they are in the middle of an interval of 1."""
    values = tensor.detach().to("cpu", torch.float32).flatten()
    finite = values[torch.isfinite(values)]
    num_odd = values.numel() - finite.numel()
    if finite.numel() == 0:
        return Histogram(of, name, 0.0, 1.0, (0,) * bins, num_odd)
    low, high = (float(bound) for bound in torch.aminmax(finite))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    # counts in float64, for above 2 ** 24 float32 counts no further
    counts = torch.histc(finite.double(), bins, low, high)
    return Histogram(of, name, low, high, tuple(int(bin_count) for bin_count in counts), num_odd)
