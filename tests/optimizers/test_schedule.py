"""Learning rates: known values, and no step without one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from phalanx.errors import TrainingError
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.optimizers.config import DECAYS, Decay


def test_warm_up_is_linear_and_reaches_the_peak():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="constant")

    assert [learning_rate(config, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("share", "total", "steps"), [(0.1, 40, 4), (0.5, 7, 3), (0.1, 9, 0), (0.0, 40, 0)])
def test_a_share_of_the_run_is_the_warm_up_of_as_many_whole_steps(share, total, steps):
    config = OptimizerConfig(lr=1.0, warmup_share=share, schedule="constant")

    rates = [learning_rate(config, step, total) for step in range(total)]

    assert rates == [(step + 1) / steps if step < steps else 1.0 for step in range(total)]


def test_cosine_goes_from_the_peak_to_the_minimum_at_the_last_step():
    config = OptimizerConfig(lr=2.0, warmup_steps=2, min_lr_ratio=0.1)

    rates = [learning_rate(config, step, 11) for step in range(11)]

    assert rates[1] == rates[2] == 2.0
    assert rates[6] == pytest.approx(0.5 * (2.0 + 0.2))
    assert rates[4] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[10] == pytest.approx(0.2)
    assert learning_rate(config, 50, 11) == pytest.approx(0.2)


def test_linear_goes_down_evenly_to_the_minimum_at_the_last_step():
    config = OptimizerConfig(lr=1.0, warmup_steps=1, schedule="linear", min_lr_ratio=0.2)

    rates = [learning_rate(config, step, 6) for step in range(6)]

    assert rates == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(config, 9, 6) == pytest.approx(0.2)


def test_wsd_stays_at_the_peak_and_goes_down_in_its_last_share():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="wsd", min_lr_ratio=0.0, decay_share=0.4)

    rates = [learning_rate(config, step, 10) for step in range(10)]

    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_wsd_in_a_run_that_is_all_warm_up_and_decay_is_linear():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="wsd", min_lr_ratio=0.0, decay_share=1.0)

    assert [learning_rate(config, step, 5) for step in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


@given(
    step=st.integers(0, 50),
    total=st.integers(1, 40),
    warmup=st.integers(0, 50),
    ratio=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
)
def test_the_rate_is_never_above_the_peak_nor_below_zero(step, total, warmup, ratio, schedule):
    config = OptimizerConfig(lr=0.5, warmup_steps=warmup, min_lr_ratio=ratio, schedule=schedule)

    assert 0.0 <= learning_rate(config, step, total) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize(("step", "total"), [(-1, 10), (0, 0)])
def test_a_step_outside_a_run_is_refused(step, total):
    with pytest.raises(TrainingError, match=f"step {step} of {total}"):
        learning_rate(OptimizerConfig(lr=1.0), step, total)


def test_a_line_of_the_table_is_all_that_another_decay_takes(monkeypatch):
    with pytest.raises(ValidationError, match="constant"):
        OptimizerConfig(lr=1.0, schedule="square")

    monkeypatch.setitem(DECAYS, "square", Decay(lambda progress, cosine: (1.0 - progress) ** 2, is_late=True))

    config = OptimizerConfig(lr=1.0, schedule="square", decay_share=0.5, min_lr_ratio=0.0)
    assert [learning_rate(config, step, 5) for step in range(5)] == [1.0, 1.0, 1.0, 0.25, 0.0]
