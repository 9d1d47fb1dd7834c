import math

import pytest
import torch

from phalanx.pipeline.tolerance.screen import Screen

WARM_UP = 16


def message(n, scale=1.0, shift=1.0):
    generator = torch.Generator().manual_seed(n)
    channels = torch.arange(16.0) - 8 + 0.5
    return scale * (torch.randn(2, 8, 16, generator=generator) + shift * channels)


def warmed(count=WARM_UP, direction="forward"):
    screen = Screen()
    for n in range(count):
        assert screen.check_message(1, direction, message(n)) is None
    return screen


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seen", [0, WARM_UP])
def test_what_is_not_finite_never_passes(value, seen):
    tensor = message(99)
    tensor[1, 7, 15] = value

    assert warmed(seen).check_message(1, "forward", tensor) == "not finite"


def test_honest_messages_pass():
    screen = warmed()

    assert all(screen.check_message(1, "forward", message(n)) is None for n in range(WARM_UP, 200))


def test_a_model_that_slowly_grows_passes():
    screen = warmed()

    assert all(screen.check_message(1, "forward", message(n, scale=1.01**n)) is None for n in range(WARM_UP, 300))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.1, 10.0, 1e4])
def test_another_scale_is_a_hit(scale):
    reason = warmed().check_message(1, "forward", message(99, scale=scale))

    assert reason is not None
    assert "factor" in reason


def test_a_flipped_sign_is_a_hit_though_its_norm_is_right():
    assert "channel means" in (warmed().check_message(1, "forward", -message(99)) or "")


def test_gradients_have_no_channel_means_to_point_away_from():
    assert warmed(direction="backward").check_message(1, "backward", -message(99)) is None


def test_before_it_is_warm_anything_finite_passes():
    assert warmed(WARM_UP - 1).check_message(1, "forward", message(99, scale=1e4)) is None


def test_what_was_a_hit_is_not_learnt():
    screen = warmed()

    hits = [screen.check_message(1, "forward", message(n, scale=10.0)) for n in range(100, 150)]

    assert all(hits)
    assert screen.check_message(1, "forward", message(99)) is None


def test_stages_and_directions_have_averages_of_their_own():
    screen = warmed()

    assert screen.check_message(2, "forward", message(99, scale=1e4)) is None
    assert screen.check_message(1, "backward", message(99, scale=1e4)) is None
    assert screen.check_message(1, "forward", message(99, scale=1e4)) is not None
