"""Bands of a distance, and the distances of single tokens that it is made of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.pipeline import token_distance, token_distances, token_residual
from phalanx.pipeline.tolerance.distance import classify_distance


def some(seed=0, shape=(2, 8, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.floats(allow_nan=True), st.floats(1e-9, 0.5))
def test_a_band_is_what_referee_and_alarm_compare(distance, tau):
    found = classify_distance(distance, tau)

    assert (found == "honest") == (distance <= tau)
    assert (found == "alarm") == (not distance <= 2 * tau)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [(0.0, "honest"), (1e-5, "honest"), (1.001e-5, "grey"), (2e-5, "grey"), (2.001e-5, "alarm"), (math.inf, "alarm")],
)
def test_the_borders_belong_to_the_milder_band(distance, expected):
    assert classify_distance(distance, 1e-5) == expected


def test_nan_is_an_alarm():
    assert classify_distance(math.nan, 1e-5) == "alarm"


def test_the_distance_is_the_largest_of_the_tokens():
    x, y = some(1), some(2)

    distances = token_distances(x, y)

    assert distances.shape == (2, 8)
    assert distances.max().item() == token_distance(x, y)


def test_the_norm_of_a_residual_is_its_tokens_distance_and_its_sign_that_of_the_claim():
    x, y = some(1), some(2)

    residual = token_residual(x, y)

    assert torch.allclose(residual.norm(dim=-1), token_distances(x, y), rtol=1e-12)
    assert torch.equal(residual.sign(), (x.double() - y.double()).sign())
    assert not token_residual(x, x).any()


def test_nan_shows_in_the_residual_of_its_token():
    x = some(1)
    x[1, 3, 0] = math.nan

    residual = token_residual(x, some(2))

    assert residual[1, 3, 0].isnan()
    assert residual[0, 0].isfinite().all()
