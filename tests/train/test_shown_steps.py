"""What a terminal shows of a step: its loss, or what is known where sites tell none."""

import io
import math

import pytest
from rich.console import Console

from phalanx.engine import StepResult
from phalanx.telemetry import MetricsFile, ProgressDisplay
from phalanx.train.records.record import GroundTruth, RunningTotals, RunRecorder


class NoBoard:
    """A curve writer that writes nothing."""

    def add_scalars(self, points, step):
        pass


@pytest.fixture
def shown(tmp_path):
    def play(loss, num_targets, **figures):
        console = Console(file=io.StringIO(), force_terminal=False, width=100)
        with MetricsFile(tmp_path / "metrics.jsonl") as metrics, ProgressDisplay(1, console=console) as progress:
            truth = GroundTruth(tmp_path / "none")
            recorder = RunRecorder(metrics, None, NoBoard(), progress, truth, RunningTotals())
            recorder.figures = figures
            result = StepResult(0, loss, num_targets, 0.25, {}, {}, "round 1", None)
            recorder.record_step(result, tokens=100, wall_s=1.0, lr=0.1, validation=None)
        return console.file.getvalue()

    return play


def test_of_a_round_of_noisy_sums_update_and_budget_are_shown_and_no_loss(shown):
    said = shown(math.nan, 0, epsilon=1.5)

    assert "update norm 0.2500" in said and "epsilon 1.500" in said and "nan" not in said


def test_a_private_step_that_has_a_loss_shows_both(shown):
    said = shown(2.5, 64, epsilon=1.5)

    assert "loss 2.5000" in said and "epsilon 1.500" in said and "update norm" not in said


def test_a_loss_that_is_not_finite_over_real_targets_is_shown_as_such(shown):
    said = shown(math.nan, 64)

    assert "loss nan" in said and "epsilon" not in said
