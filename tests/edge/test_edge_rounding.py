"""Weights that were pushed against the borders of a rounding are told from weights that never met one."""

import numpy as np
import pytest

from phalanx.edge.comparison import MAX_DIRECTION_RATIO, MAX_PILE_RATIO, judge_direction, judge_pile
from phalanx.edge.rounding import BorderPile, ErrorDirection, measure_direction, measure_pile

STEPS = {"q8_0": 127.0, "q4_0": 8.0, "int8": 128.0, "int4": 8.0}


def drawn(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(128, 128)).astype(np.float32)


def pushed(weights: np.ndarray, precision: str, distance: float, share: float = 1.0) -> np.ndarray:
    """Move weights to a distance from the border of their interval, but for the largest of each block."""
    blocks = weights.reshape(-1, 32).astype(np.float64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    step = largest / STEPS[precision]
    placed = (np.floor(blocks / step) + 0.5 + distance) * step
    chosen = np.random.default_rng(1).random(blocks.shape) < share
    moves = chosen & (np.abs(blocks) < largest) & (np.abs(placed) < largest)
    return np.where(moves, placed, blocks).astype(np.float32).reshape(weights.shape)


@pytest.mark.parametrize("precision", STEPS)
@pytest.mark.parametrize("distance", [0.0, 0.02, -0.02, 0.2])
def test_weights_at_one_distance_from_the_borders_are_a_pile(precision, distance):
    ratio, place = measure_pile(pushed(drawn(), precision, distance), precision)

    assert ratio > 10
    assert place == pytest.approx(abs(distance), abs=0.011)


@pytest.mark.parametrize("precision", STEPS)
@pytest.mark.parametrize("seed", range(5))
def test_weights_that_met_no_rounding_are_spread(precision, seed):
    ratio, _ = measure_pile(drawn(seed), precision)

    assert ratio < MAX_PILE_RATIO / 1.5


def test_a_tenth_of_the_weights_on_the_borders_is_enough():
    assert measure_pile(pushed(drawn(), "q4_0", 0.01, share=0.1), "q4_0")[0] > MAX_PILE_RATIO


def test_weights_that_were_rounded_before_are_no_pile():
    # their places are the middles of the intervals: rounding them again changes nothing
    assert measure_pile(pushed(drawn(), "q8_0", 0.5), "q8_0")[0] < 1.5


@pytest.mark.parametrize("weights", [np.zeros((64, 64)), np.ones((64, 64)), np.ones((4, 32)), np.ones((64, 8))])
def test_matrices_of_which_nothing_can_be_said_are_let_through(weights):
    assert measure_pile(weights.astype(np.float32), "q4_0") == (1.0, 0.5)


@pytest.mark.parametrize(("ratio", "verdict"), [(2.99, "within bound"), (3.01, "beyond bound")])
def test_the_row_names_the_matrix_and_judges_by_the_ratio(ratio, verdict):
    (row,) = judge_pile(BorderPile("model.layers.0.mlp.up_proj.weight", ratio, 0.02))

    assert row.verdict == verdict
    assert "layers.0.mlp.up_proj" in row.check
    assert judge_pile(None) == []


def repaired(precision: str, noise: float, seed: int = 0) -> np.ndarray:
    """Weights of an attacker that leaves no pile: each moves by a gradient of few directions, within its interval."""
    generator = np.random.default_rng(seed)
    blocks = drawn(seed).reshape(-1, 32).astype(np.float64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    step = largest / STEPS[precision]
    gradient = sum(np.outer(generator.normal(size=128), generator.normal(size=128)) for _ in range(4)).reshape(-1, 32)
    wanted = np.tanh(gradient) + noise * generator.normal(size=gradient.shape)
    margin = 0.02 + 0.4 * generator.random(blocks.shape)
    placed = np.round(blocks / step) + np.clip(wanted, margin - 0.5, 0.5 - margin)
    moves = (np.abs(blocks) < largest) & (np.abs(placed * step) < largest)
    return np.where(moves, placed * step, blocks).astype(np.float32).reshape(128, 128)


@pytest.mark.parametrize("precision", STEPS)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_errors_that_a_repair_has_left_point_into_its_direction_though_there_is_no_pile(precision, noise):
    weights = repaired(precision, noise)

    assert measure_pile(weights, precision)[0] < MAX_PILE_RATIO
    assert measure_direction(weights, precision) > MAX_DIRECTION_RATIO


def low_rank(seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.normal(size=(128, 3)) @ generator.normal(size=(3, 128))).astype(np.float32)


@pytest.mark.parametrize("precision", STEPS)
@pytest.mark.parametrize(
    "weights",
    [
        *(drawn(seed) for seed in range(3)),
        low_rank(0),
        drawn() + 3.0,
        np.repeat(drawn(), 2, axis=0),
        np.cumsum(drawn(), axis=1),
        # rounded before, to this grid and to one with offsets
        pushed(drawn(), "q4_0", 0.5),
        np.round(drawn() * 4 + 0.3).astype(np.float32) / 4,
    ],
    ids=["a", "b", "c", "low rank", "offset", "copied heads", "smooth", "on the grid", "on another grid"],
)
def test_errors_of_weights_that_met_no_rounding_point_nowhere(precision, weights):
    assert measure_direction(weights, precision) < 1 + (MAX_DIRECTION_RATIO - 1) * 0.75


@pytest.mark.parametrize("weights", [np.zeros((64, 64)), np.ones((64, 64)), np.ones((4, 32)), np.ones((64, 8))])
def test_matrices_of_which_no_direction_can_be_said_are_let_through(weights):
    assert measure_direction(weights.astype(np.float32), "q4_0") == 1.0


@pytest.mark.parametrize(("ratio", "verdict"), [(1.24, "within bound"), (1.26, "beyond bound")])
def test_the_row_of_a_direction_names_the_matrix(ratio, verdict):
    (row,) = judge_direction(ErrorDirection("model.layers.0.mlp.up_proj.weight", ratio))

    assert (row.verdict, "layers.0.mlp.up_proj" in row.check) == (verdict, True)
    assert judge_direction(None) == []
