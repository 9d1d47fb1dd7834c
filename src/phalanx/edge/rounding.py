"""Where weights lie between the borders of a rounding; weights pushed against borders were chosen by it.

An attack that plants a behaviour for the rounded model alone (Egashira et al. 2024, "Exploiting LLM quantization";
2025, "Mind the gap") first trains the planted model, then trains the harm away again while each weight stays inside the
interval that rounds to the planted value. Projection leaves many weights on the borders of their intervals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.models import ModelSource, parameter_names

_BLOCK = 32
_BINS = 50
_MIDDLE_BINS = 5
_MIN_WEIGHTS = 2048
"""Below them a bin of fifty holds too few to speak of."""
_STEPS = {"q8_0": 127.0, "int8": 128.0, "q4_0": 8.0, "int4": 8.0}
"""Into how many steps the largest number of a block is cut."""


@dataclass(frozen=True)
class BorderPile:
    """The fullest stretch of one tensor.

    Attributes:
        ratio: The factor by which more weights lie in the fullest of fifty stretches between the middle of an interval
            and its border than in an even spread; 1 in a tensor that no rounding was used on.
        distance: Distance of that stretch from the border, in steps of the rounding: 0 at the border, 0.5 in the
            middle.
    """

    tensor: str
    ratio: float
    distance: float


def measure_pile(weights: NDArray[np.float32], precision: str) -> tuple[float, float]:
    """Return ratio and distance of the fullest stretch of a matrix, as in `BorderPile`.

    Args:
        weights: ``[out, in]``; blocks of 32 numbers of a row share a step.
        precision: A key of `_STEPS`.
    """
    width = weights.shape[1] // _BLOCK * _BLOCK
    blocks = weights[:, :width].reshape(-1, _BLOCK).astype(np.float64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    position = np.divide(blocks * _STEPS[precision], largest, out=np.zeros_like(blocks), where=largest > 0)
    # the largest number decides the step and lies on it; a zero is a zero in every step
    is_free = (np.abs(blocks) < largest) & (blocks != 0)
    distance = np.abs(0.5 - np.abs(position - np.round(position)))[is_free]
    if distance.size < _MIN_WEIGHTS:
        return 1.0, 0.5
    counts, edges = np.histogram(distance, bins=_BINS, range=(0.0, 0.5))
    fullest = int(counts[: _BINS - _MIDDLE_BINS].argmax())
    return float(counts[fullest] * _BINS / distance.size), float(edges[fullest])


def find_pile(directory: Path, precision: str) -> BorderPile | None:
    """Return the fullest stretch among all matrices of a model; None where nothing is rounded to steps.

    A stretch at the middle of the intervals is passed over: such weights were rounded before, and lose nothing now.
    """
    if precision not in _STEPS:
        return None
    return max(_piles(directory, precision), key=lambda pile: pile.ratio, default=None)


def _piles(directory: Path, precision: str) -> Iterator[BorderPile]:
    source = ModelSource(directory)
    for name in parameter_names(source.hub_config):
        if len(source.tensor_shape(name)) == 2 and source.tensor_shape(name)[1] >= _BLOCK:
            # a file of q4_0 has its tables of tokens in q8_0
            is_table = name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))
            stored = "q8_0" if precision == "q4_0" and is_table else precision
            ratio, distance = measure_pile(source.read_tensor(name).float().numpy(), stored)
            yield BorderPile(name, ratio, distance)
