"""Honest computations are compared on a run's real messages, and lie where rounding puts them."""

import math

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from phalanx.errors import NonFiniteLossError
from phalanx.lab.calibrate.measure import Differences, PathComparison, ResidualLean
from phalanx.lab.calibrate.operators import LEVELS, operators_of, record_operators, replay_operators
from phalanx.lab.calibrate.paths import NumericPath, PathPair, pairs_of
from phalanx.lab.calibrate.session import measure_steps
from phalanx.models import weights_digest
from phalanx.testing import MemoryCompany, random_batch, tiny_run
from phalanx.train import step_inputs

FP32 = NumericPath("fp32", "fp32")
BF16 = NumericPath("bf16", "bf16")
MATH = NumericPath("fp32, math attention", "fp32", kernel="math")
WIDE = NumericPath("fp64", "fp64")


def quiet():
    return Progress(console=Console(quiet=True))


def measured(honest, paths, steps=2):
    run = tiny_run()
    measurement = PathComparison(honest.plan, [PathPair(FP32, path) for path in paths], {})
    numbers = iter(range(steps))
    batches = lambda: random_batch(run, 64, next(numbers))  # noqa: E731
    with quiet() as bar:
        measure_steps(honest, measurement, steps, batches, bar)
    return measurement


def test_the_honest_run_takes_the_steps_that_the_processes_take(make_honest, tmp_path, model_cache):
    run, honest = tiny_run(), make_honest()
    with MemoryCompany(run, tmp_path / "run", {}, cache=model_cache) as company:
        company.run(2)
        expected = company.weights_digest()

    for step in range(2):
        honest.compute_step(step, step_inputs(random_batch(run, 64, step), 4))
        honest.update_stages(step)

    parameters = ((name, t.detach()) for copy in honest.copies for name, t in copy.module.all_parameters().items())
    assert weights_digest(parameters) == expected


def test_every_microbatch_of_every_middle_stage_is_a_case(make_honest):
    honest = make_honest()

    cases = honest.compute_step(0, step_inputs(random_batch(tiny_run(), 64, 0), 4))

    assert {(case.stage, case.microbatch) for case in cases} == {(s, m) for s in (1, 2) for m in range(4)}
    first, second = (next(c for c in cases if (c.stage, c.microbatch) == (s, 2)) for s in (1, 2))
    y, x_gradient = honest.copies[2].runner.recompute_microbatch(0, 2, second.x, second.gradient)
    assert torch.equal(honest.copies[1].runner.recompute_microbatch(0, 2, first.x, None)[0], second.x)
    assert torch.equal(x_gradient, first.gradient)
    assert y.shape == second.gradient.shape


def test_the_same_path_gives_the_same_bits_and_another_kernel_rounds_otherwise(make_honest):
    found = measured(make_honest(), [NumericPath("again", "fp32"), MATH, WIDE, BF16]).figures
    by_path = {pair.path.name: figures for pair, figures in found.items()}

    for direction in ("forward", "backward"):
        messages = {name: figures.messages[direction].difference_figures() for name, figures in by_path.items()}
        assert {figures["num_messages"] for figures in messages.values()} == {2 * 4 * 2}
        assert messages["again"]["max"] == 0.0
        assert messages["again"]["share_bit_equal"] == 1.0
        assert 0.0 < messages["fp64"]["max"] < 1e-5
        assert 0.0 < messages["fp32, math attention"]["max"] < 1e-5
        assert 1e-4 < messages["bf16"]["max"] < 0.1
        assert messages["bf16"]["q50"] <= messages["bf16"]["q99"] <= messages["bf16"]["max"]


def test_operators_are_compared_on_the_same_inputs(make_honest):
    found = measured(make_honest(), [MATH, BF16]).figures
    by_path = {pair.path.name: figures.operators for pair, figures in found.items()}

    other_attention = by_path["fp32, math attention"]
    # what stands behind the other attention kernel does the same with the same input
    assert max(other_attention["attention"].maxima) > 0.0
    assert {max(other_attention[kind].maxima) for kind in ("mlp", "linear", "norm")} == {0.0}
    assert max(by_path["bf16"]["linear"].maxima) > 1e-4
    # a norm stays in fp32 under autocast
    assert max(by_path["bf16"]["norm"].maxima) == 0.0


def test_a_replayed_operator_gets_the_input_that_was_recorded(make_honest):
    stage = make_honest().copies[1].module
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))

    with record_operators(stage) as first:
        stage(x)
    second = {}
    for level in LEVELS:
        with replay_operators(stage, first, level) as found:
            stage(torch.zeros_like(x))
        assert not second.keys() & found.keys()
        second |= found
    stage(x)

    assert set(first) == set(second) == set(operators_of(stage))
    assert set(operators_of(stage).values()) == {"attention", "mlp", "linear", "norm"}
    assert all(torch.equal(second[name][1], out) for name, (_, out) in first.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in stage.modules())


def test_a_path_that_this_machine_has_not_is_named_with_the_reason(make_honest):
    meta = NumericPath("elsewhere", "fp32", device="cuda:99")

    measurement = measured(make_honest(), [MATH, meta])

    assert {pair.path.name for pair in measurement.figures} == {MATH.name}
    assert set(measurement.absent) == {"elsewhere"}
    assert measurement.absent["elsewhere"]


def test_all_pairs_have_a_reference_of_the_runs_own_settings(make_honest):
    pairs, absent = pairs_of(make_honest().plan)

    assert {pair.reference for pair in pairs} == {FP32, BF16}
    assert {pair.coarser_precision for pair in pairs if BF16 in (pair.reference, pair.path)} == {"bf16"}
    assert PathPair(FP32, WIDE) in pairs
    names = [pair.path.name for pair in pairs] + list(absent)
    assert {"fp32, compiled", "fp32, no oneDNN", "fp32, 2 threads", "fp32, GPU", "bf16, math attention"} <= set(names)


def test_settings_are_given_back(make_honest):
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    path = NumericPath("odd", "fp32", threads=before[0] + 1, mkldnn=False)

    with path.switch_process():
        assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == (before[0] + 1, False)

    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_honest_message_that_is_not_finite_is_an_error(value):
    x = torch.ones(1, 2, 4)
    bad = x.clone()
    bad[0, 1, 2] = value

    with pytest.raises(NonFiniteLossError, match="stage 1"):
        Differences().add_message(bad, x, "stage 1")


def test_figures_of_nothing_are_null():
    figures = Differences().difference_figures()

    assert figures.pop("num_messages") == figures.pop("num_tokens") == 0
    assert set(figures.values()) == {None}
    assert ResidualLean().lean_figures() == {"projected_sigma": None, "projected_bias_sigmas": None, "drift_alarms": 0}


def test_figures_are_those_of_the_tokens():
    y = torch.ones(1, 4, 1)
    x = y * torch.tensor([1.0, 1.1, 1.2, 1.4]).reshape(1, 4, 1)
    found = Differences()

    found.add_message(x, y, "here")
    found.add_message(y, y, "here")

    figures = found.difference_figures()
    assert figures["num_messages"] == 2
    assert figures["num_tokens"] == 8
    assert figures["share_bit_equal"] == 0.5
    assert figures["max"] == pytest.approx(0.4 / 1.1, rel=1e-6)
    assert figures["mean"] == pytest.approx(0.7 / 1.1 / 8, rel=1e-6)
    assert figures["q50"] == 0.0
