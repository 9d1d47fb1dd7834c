"""Learning rates: known values, and no step without one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import TrainingError
from phalanx.optimizers import OptimizerConfig, learning_rate


def test_warm_up_is_linear_and_reaches_the_peak():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="constant")

    assert [learning_rate(config, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_goes_from_the_peak_to_the_minimum_at_the_last_step():
    config = OptimizerConfig(lr=2.0, warmup_steps=2, min_lr_ratio=0.1)

    rates = [learning_rate(config, step, 11) for step in range(11)]

    assert rates[1] == rates[2] == 2.0
    assert rates[6] == pytest.approx(0.5 * (2.0 + 0.2))
    assert rates[4] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[10] == pytest.approx(0.2)
    assert learning_rate(config, 50, 11) == pytest.approx(0.2)


@given(
    step=st.integers(0, 50),
    total=st.integers(1, 40),
    warmup=st.integers(0, 50),
    ratio=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_the_rate_is_never_above_the_peak_nor_below_zero(step, total, warmup, ratio, schedule):
    config = OptimizerConfig(lr=0.5, warmup_steps=warmup, min_lr_ratio=ratio, schedule=schedule)

    assert 0.0 <= learning_rate(config, step, total) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize(("step", "total"), [(-1, 10), (0, 0)])
def test_a_step_outside_a_run_is_refused(step, total):
    with pytest.raises(TrainingError, match=f"step {step} of {total}"):
        learning_rate(OptimizerConfig(lr=1.0), step, total)
