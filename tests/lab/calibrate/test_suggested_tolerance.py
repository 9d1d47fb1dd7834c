"""From fitted tails to the tolerance of a run file; nothing is suggested where something is not known."""

import random

import pytest

from phalanx.errors import ConfigError
from phalanx.lab.calibrate import calibrate
from phalanx.lab.calibrate.paths import NumericPath, PathPair
from phalanx.lab.calibrate.result import FittedTail, fit_tail, suggest_tolerance, threshold_rows
from phalanx.lab.calibrate.session import steps_for, without_compiled
from phalanx.testing import tiny_run

FP32, BF16 = NumericPath("fp32", "fp32"), NumericPath("bf16", "bf16")


def fitted(scale, reference=FP32, *, count=400, seed=1, name="other"):
    rng = random.Random(seed)
    maxima = [scale * (1.0 + rng.random()) for _ in range(count)]
    path = NumericPath(name, reference.precision)
    return FittedTail(PathPair(reference, path), "forward", not any(maxima), fit_tail(maxima))


def suggested(fits, precision="fp32"):
    return suggest_tolerance(threshold_rows(fits), fits, precision)


def test_the_suggestion_is_a_round_number_above_the_worst_pair():
    fits = [fitted(1e-7), fitted(1e-6, name="worst"), fitted(3e-7)]

    found = suggested(fits)

    tail = fits[1].tail
    assert 2e-6 < found["tolerance"] < 2e-5
    assert f"{found['tolerance']:.0e}"[0] in "125"
    assert tail.share_above(found["tolerance"]) * 1e6 <= 1.0
    last = threshold_rows(fits)[-1]
    assert (last["tau"], last["worst"]) == (found["tolerance"], "worst against fp32, forward")
    assert last["per_million"] <= 1.0


def test_smaller_thresholds_are_listed_with_the_price_of_taking_them():
    rows = threshold_rows([fitted(1e-6)])

    bounds = [row["per_million"] for row in rows]
    assert len(rows) >= 2
    assert bounds == sorted(bounds, reverse=True)
    assert all(bound > 1.0 for bound in bounds[:-1])


def test_each_precision_has_thresholds_of_its_own():
    fits = [fitted(1e-6), fitted(1e-2, BF16)]

    assert suggested(fits, "fp32")["tolerance"] < 1e-4 < suggested(fits, "bf16")["tolerance"]


def test_pairs_with_equal_bits_have_no_part():
    silent = FittedTail(PathPair(FP32, NumericPath("2 threads", "fp32")), "forward", True, None)

    assert suggested([silent, fitted(1e-6)]) == suggested([fitted(1e-6)])
    assert suggested([silent])["tolerance"] is None
    assert "equal bits" in suggested([silent])["reason"]


def test_one_pair_without_a_tail_leaves_everything_open():
    loose = FittedTail(PathPair(FP32, NumericPath("rare", "fp32")), "backward", False, None)
    fits = [fitted(1e-6), loose]

    assert suggested(fits)["tolerance"] is None
    assert "rare against fp32, backward" in suggested(fits)["reason"]
    assert {row["per_million"] for row in threshold_rows(fits)} == {None}


def test_differences_as_large_as_the_messages_allow_no_threshold():
    assert suggested([fitted(0.6)])["tolerance"] is None


def test_a_run_without_a_middle_stage_has_nothing_to_calibrate(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))

    with pytest.raises(ConfigError, match="stages = 2"):
        calibrate(tiny_run(stages=2))


@pytest.mark.parametrize(("messages", "steps"), [(1, 1), (8, 1), (9, 2), (10_000, 100)])
def test_steps_are_those_that_the_messages_need_and_at_most_the_runs(make_honest, messages, steps):
    plan = make_honest().plan
    assert (plan.microbatches, len(plan.stages), plan.total_steps) == (4, 4, 100)

    assert steps_for(plan, messages) == steps


def test_quick_says_that_it_leaves_the_compiled_paths_out():
    compiled = NumericPath("fp32, compiled", "fp32", compiled=True)

    pairs, absent = without_compiled([PathPair(FP32, compiled), PathPair(FP32, BF16)], {"GPU": "none"})

    assert pairs == [PathPair(FP32, BF16)]
    assert absent == {"GPU": "none", "fp32, compiled": "left out by --quick"}
