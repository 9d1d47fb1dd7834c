"""What is made of logs: when a death was noticed, what it disturbed, what was trained on, how much work was useful."""

from datetime import UTC, datetime

import pytest

from phalanx.lab.bench.chaos.goodput import Window, checkpoint_cost, checkpoint_interval, goodput_block, make_arm_run
from phalanx.lab.bench.chaos.kills import kill_rows, kills_block, samples_off

DEATH = {"worker": "worker-1", "point": "commit", "step": 4, "microbatch": None, "time": 100.0}


def event(kind, time, **body):
    return {"kind": kind, "time": datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z"), "body": body}


def line(step, time, attempts=1):
    return {"step": step, "time": time, "attempts": attempts}


def run_row(**changes):
    kept = {"planned": 1, "bit_identical": True, "samples_lost": 0, "samples_doubled": 0, "false_accusations": 0}
    return {**kept, "steps_lost": 0, "kills": [], **changes}


def test_the_disturbed_step_is_the_first_to_end_after_the_death_was_noticed():
    # the step that was as good as done ends undisturbed
    lines = [line(3, 99.0), line(4, 100.1), line(5, 102.0, attempts=2), line(6, 103.0)]
    events = [event("link_broken", 99.5, party="worker-2"), event("link_broken", 100.25, party="worker-1")]

    (row,) = kill_rows([DEATH], events, lines)

    assert (row["step_done"], row["attempts"]) == (5, 2)
    assert row["noticed_s"] == pytest.approx(0.25)
    assert row["after_detection_s"] == pytest.approx(1.75)
    assert row["recovery_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("events", "lines"), [([], [line(5, 102.0)]), ([event("link_broken", 100.25, party="worker-1")], [line(4, 100.1)])]
)
def test_what_was_not_noticed_or_not_finished_has_no_time(events, lines):
    (row,) = kill_rows([DEATH], events, lines)

    assert row["recovery_s"] is None
    assert kills_block([run_row(kills=[row])])["not_timed"] == 1


def test_a_batch_too_few_and_one_too_many_are_counted_in_sequences():
    assert samples_off(["a", "b", "c"], ["a", "b", "c"], 16) == (0, 0)
    assert samples_off(["a", "b", "c"], ["a", "c"], 16) == (16, 0)
    assert samples_off(["a", "b", "c"], ["a", "b", "b", "c"], 16) == (0, 16)
    # as many batches, and yet not the same
    assert samples_off(["a", "b", "c"], ["a", "b", "b"], 16) == (16, 16)
    # a second epoch may have the same batch again
    assert samples_off(["a", "b", "a"], ["a", "b", "a"], 16) == (0, 0)


def test_one_run_with_other_bits_is_enough_to_say_so():
    block = kills_block([run_row(), run_row(bit_identical=False, samples_lost=16, false_accusations=1)])

    assert (block["bit_identical"], block["runs_bit_identical"]) == (False, 1)
    assert (block["samples_lost"], block["false_accusations"]) == (16, 1)


def test_nothing_measured_is_null_and_not_zero():
    block = kills_block([])

    assert block["count"] == 0
    figures = ("bit_identical", "samples_lost", "samples_doubled", "false_accusations", "recovery_s_worst")
    assert [block[name] for name in figures] == [None] * 5
    assert goodput_block([], (15.0, 300.0), "phalanx") == {"15": None, "300": None}


def test_the_interval_between_checkpoints_is_youngs():
    assert checkpoint_interval(cost_s=0.3, mean_s=15.0, step_s=1.0) == 3
    assert checkpoint_interval(cost_s=0.3, mean_s=60.0, step_s=1.0) == 6
    assert checkpoint_interval(cost_s=0.001, mean_s=15.0, step_s=10.0) == 1


def test_what_a_checkpoint_adds_is_seen_in_the_steps_after_it():
    gaps = [1.0] * 8 + ([1.5, 1.1, 1.0, 1.0] + [1.0] * 4) * 2
    times = [sum(gaps[:n]) for n in range(len(gaps) + 1)]
    lines = [line(step - 1, time) for step, time in enumerate(times)]

    cost_s, step_s = checkpoint_cost(lines, every=8)

    assert (cost_s, step_s) == (pytest.approx(0.6), pytest.approx(1.0))


def test_both_arms_lose_workers_at_the_same_times_and_the_last_loss_counts():
    window = Window(15.0, 8, 1.0, 1.0)

    assert len(window.kill_times) == 8
    assert window.kill_times == Window(15.0, 8, 20.0, 60.0).kill_times
    assert window.length_s == 8 * 15.0 >= window.kill_times[-1] + 7.5


def test_restarts_have_no_guard_and_takeovers_have_replacements(tiny):
    guarded, bare = make_arm_run(tiny, "phalanx", 8), make_arm_run(tiny, "torchrun", 8)

    assert guarded.guard == tiny.guard
    assert guarded.guard.is_enabled
    assert guarded.pipeline.respawns >= 8
    assert (bare.guard.mode, bare.pipeline.respawns) == ("off", 0)
    assert guarded.train == bare.train
    assert guarded.checkpoint == bare.checkpoint
