"""Clipping over stages equals clipping of the whole, and a norm that is no number stops the step."""

import math

import pytest
import torch

from phalanx.errors import NonFiniteLossError
from phalanx.optimizers import clip_coefficient, gradient_norm_squared


def gradients(seed, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"b": (7, 5), "a": (11,), "c": ()}
    return {name: scale * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_stages_that_clip_together_equal_torch_on_the_whole():
    stages = [gradients(seed, 3.0) for seed in range(3)]
    whole = [torch.nn.Parameter(torch.zeros_like(g)) for stage in stages for g in stage.values()]
    for parameter, gradient in zip(whole, [g for s in stages for g in s.values()], strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(whole, 1.0)

    total = math.sqrt(sum(gradient_norm_squared(stage) for stage in stages))
    coefficient = clip_coefficient(total, 1.0)

    assert total == pytest.approx(float(norm), rel=1e-6)
    ours = [g * coefficient for stage in stages for g in stage.values()]
    for parameter, clipped in zip(whole, ours, strict=True):
        torch.testing.assert_close(clipped, parameter.grad, rtol=2e-7, atol=0)


def test_a_small_gradient_and_no_limit_are_left_alone():
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(1e6, None) == 1.0


def test_the_order_of_the_names_decides_not_that_of_the_dict():
    forward = gradients(1)
    backward = dict(reversed(forward.items()))

    assert gradient_norm_squared(forward) == gradient_norm_squared(backward)
    assert gradient_norm_squared({}) == 0.0


def test_half_precision_is_added_up_in_float32():
    ones = {"a": torch.ones(4096, dtype=torch.bfloat16)}

    assert gradient_norm_squared(ones) == pytest.approx(4096)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_one_bad_number_anywhere_stops_the_step(poison, limit):
    stage = gradients(2)
    stage["b"][3, 2] = poison

    with pytest.raises(NonFiniteLossError, match="nothing was updated"):
        clip_coefficient(math.sqrt(gradient_norm_squared(stage)), limit)


def test_a_negative_norm_is_refused():
    with pytest.raises(NonFiniteLossError):
        clip_coefficient(-1.0, 1.0)
