import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.pipeline import token_distance


def some(seed=0, shape=(2, 8, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_equal_tensors_are_at_distance_zero():
    assert token_distance(some(), some()) == 0.0


def test_the_distance_is_the_worst_tokens_relative_error():
    y = torch.zeros(1, 2, 2)
    y[0, 0], y[0, 1] = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])
    x = y.clone()
    x[0, 1, 0] = 0.5

    rms = math.sqrt((25 + 1) / 2)
    assert token_distance(x, y) == pytest.approx(0.5 / (1 + 0.1 * rms), rel=1e-12)


@given(st.integers(0, 1), st.integers(0, 31))
def test_a_lie_about_one_token_counts_as_much_in_a_long_sequence(row, token):
    honest = some(shape=(2, 32, 16))
    lie = honest.clone()
    lie[row, token] *= -1

    assert token_distance(lie, honest) > 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_infinitely_far(value, side):
    pair = [some(), some()]
    pair[side][1, 3, 5] = value

    assert token_distance(*pair) == math.inf


def test_two_equal_nans_are_infinitely_far():
    x = torch.full((1, 2, 3), math.nan)

    assert token_distance(x, x) == math.inf


@pytest.mark.parametrize("shape", [(2, 8, 15), (2, 7, 16), (1, 8, 16), (2, 16, 8)])
def test_other_shapes_are_infinitely_far(shape):
    assert token_distance(some(shape=shape), some()) == math.inf


def test_a_zero_token_is_judged_by_the_scale_of_the_others():
    y = some()
    y[0, 0] = 0.0
    x = y.clone()
    x[0, 0] = 1e-6

    assert 0 < token_distance(x, y) < 1e-4


def test_anything_against_all_zeros_is_far_and_zeros_are_not():
    zeros = torch.zeros(1, 2, 3)

    assert token_distance(zeros, zeros) == 0.0
    assert not token_distance(torch.full((1, 2, 3), 1e-30), zeros) <= 1.0


@given(st.floats(1e-6, 1e6))
def test_the_scale_of_both_does_not_matter(scale):
    x, y = some(1).double(), some(2).double()

    assert token_distance(scale * x, scale * y) == pytest.approx(token_distance(x, y), rel=1e-9)


@pytest.mark.parametrize("factor", [1e-7, 1e-3])
def test_a_uniform_drift_is_found_at_about_its_factor(factor):
    y = some().double()

    assert token_distance(y * (1 + factor), y) == pytest.approx(factor, rel=0.15)
