"""Where weights lie between the borders of a rounding; weights pushed against borders were chosen by it.

An attack that plants a behaviour for the rounded model alone (Egashira et al. 2024, "Exploiting LLM quantization";
2025, "Mind the gap") first trains the planted model, then trains the harm away again while each weight stays inside the
interval that rounds to the planted value. Projection leaves many weights on the borders of their intervals. An attacker
who draws a margin for each weight leaves no pile, but the errors of the rounding are then the way from the planted
model to the clean one: they point where gradients pointed, and not in every direction alike.
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
"""Minimum number of weights of a tensor; with fewer, one of fifty bins holds too few for a ratio."""
_STEPS = {"q8_0": 127.0, "int8": 128.0, "q4_0": 8.0, "int4": 8.0}
"""Number of steps between zero and the largest number of a block."""
_TABLES = ("embed_tokens.weight", "lm_head.weight", "wte.weight")
_MIN_ERROR = 0.05
"""In steps; weights with smaller errors were rounded before, and lose nothing."""
_NUM_POWERS = 15
_MANY_WEIGHTS = 1 << 17
"""Number of errors from which one shuffle is enough: another order changes the result no more."""


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


@dataclass(frozen=True)
class ErrorDirection:
    """The strongest direction of one tensor's rounding errors.

    Attributes:
        ratio: Largest singular value of the errors, by that of the same errors in another order inside each block; 1 in
            a tensor that no rounding was used on.
    """

    tensor: str
    ratio: float


def measure_direction(weights: NDArray[np.float32], precision: str) -> float:
    """Return the ratio of `ErrorDirection` for a matrix ``[out, in]``.

    The order inside blocks alone is changed, since the mean error of a block may come from an earlier rounding.
    """
    width = weights.shape[1] // _BLOCK * _BLOCK
    # heads that were copied have the same errors
    rows = np.stack(list({row.tobytes(): row for row in weights[:, :width]}.values()))
    blocks = rows.reshape(-1, _BLOCK).astype(np.float32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    position = np.divide(blocks * np.float32(_STEPS[precision]), largest, out=np.zeros_like(blocks), where=largest > 0)
    errors = np.where(np.abs(blocks) < largest, position - np.round(position), 0)
    if errors.size < _MIN_WEIGHTS or np.sqrt(np.mean(errors**2)) < _MIN_ERROR:
        return 1.0
    generator = np.random.default_rng(0)
    num_shuffles = 3 if errors.size < _MANY_WEIGHTS else 1
    shuffled = [_largest_singular(generator.permuted(errors, axis=1).reshape(rows.shape)) for _ in range(num_shuffles)]
    return float(_largest_singular(errors.reshape(rows.shape)) / np.mean(shuffled))


def _largest_singular(matrix: NDArray[np.float32]) -> float:
    """Return the largest singular value, by power iteration from a fixed start."""
    vectors = np.random.default_rng(1).normal(size=(matrix.shape[1], 4)).astype(np.float32)
    for _ in range(_NUM_POWERS):
        vectors = np.linalg.qr(matrix.T @ (matrix @ vectors))[0]
    return float(np.linalg.norm(matrix @ vectors, 2))


def find_direction(directory: Path, precision: str) -> ErrorDirection | None:
    """Return the strongest direction among the matrices of a model's layers; None where nothing is rounded to steps.

    Tables of tokens are passed over: tokens that no text holds have nearly the same row, and so the same errors.
    """
    if precision not in _STEPS:
        return None
    source = ModelSource(directory)
    directions = [
        ErrorDirection(name, measure_direction(source.read_tensor(name).float().numpy(), precision))
        for name in _matrix_names(source)
        if not name.endswith(_TABLES)
    ]
    return max(directions, key=lambda direction: direction.ratio, default=None)


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
    for name in _matrix_names(source):
        # a file of q4_0 has its tables of tokens in q8_0
        stored = "q8_0" if precision == "q4_0" and name.endswith(_TABLES) else precision
        ratio, distance = measure_pile(source.read_tensor(name).float().numpy(), stored)
        yield BorderPile(name, ratio, distance)


def _matrix_names(source: ModelSource) -> Iterator[str]:
    for name in parameter_names(source.hub_config):
        if len(source.tensor_shape(name)) == 2 and source.tensor_shape(name)[1] >= _BLOCK:
            yield name
