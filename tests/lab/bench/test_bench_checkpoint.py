"""The checkpoint bench: three arms take turns in one run, and each interval pays for its own checkpoint."""

import json

import pytest

from phalanx.checkpoint import CheckpointConfig
from phalanx.errors import TrainingError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.overhead import checkpoint
from phalanx.lab.bench.overhead.checkpoint import CheckpointWorkload, measure_checkpoint
from phalanx.testing import random_batch

KEYS = {
    "model",
    "arm",
    "stages",
    "every",
    "rounds",
    "checkpoint_bytes",
    "step_s",
    "extra_step_time",
    "extra_step_time_worst",
    "stall_s",
    "stall_share",
    "write_s",
}


@pytest.fixture
def workload(tiny):
    run = tiny.model_copy(update={"checkpoint": CheckpointConfig(every=2, keep=1)})
    return CheckpointWorkload("tiny", run, rounds=2)


@pytest.mark.slow
def test_every_arm_is_measured_in_the_same_run_and_what_was_not_is_null(workload):
    result = measure_checkpoint(workload, quick=True)

    json.dumps(result, allow_nan=False)
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == ["none", "synchronous", "asynchronous"]
    assert all(set(row) == KEYS for row in rows.values())
    assert all(row["rounds"] == 2 and row["step_s"] > 0 for row in rows.values())
    for key in ("extra_step_time", "stall_s", "write_s", "checkpoint_bytes"):
        assert rows["none"][key] is None
        assert rows["synchronous"][key] is not None
        assert rows["asynchronous"][key] is not None
    # writing at once, everything of it stands in the way
    assert rows["synchronous"]["stall_s"] >= rows["synchronous"]["write_s"]
    assert rows["synchronous"]["checkpoint_bytes"] > 0


class Idle:
    """Engine, loader and saver of a session in which nothing is trained; a save that fails is an event, as ever."""

    def __init__(self, run):
        self.run, self.events = run, []

    def train_turn(self, step, inputs):
        return None

    def next_batch(self):
        return random_batch(self.run, 64, 0)

    def save_now(self, num_steps):
        self.events.append(("checkpoint_failed", {"reason": "disk full"}))

    def advance_pending(self):
        return None

    finish_pending = advance_pending


def test_a_checkpoint_that_fails_makes_no_figure(workload):
    idle = Idle(workload.run)
    session = checkpoint._CheckpointSession(workload.run, None, idle, idle, idle)
    session.events = idle.events
    session.run_block("none", checkpoint._Arm())

    with pytest.raises(TrainingError, match=r"synchronous: expected one checkpoint.*disk full"):
        session.run_block("synchronous", checkpoint._Arm())


def test_it_is_on_the_command_line():
    assert "checkpoint" in BENCHES
