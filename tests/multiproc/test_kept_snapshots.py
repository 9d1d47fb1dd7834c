"""Shadows that are sent a snapshot every few steps, in processes of their own: one is killed, one lies."""

import os
import signal

import pytest
from real_runs import FORWARD_LIAR, worker_pid

SNAPSHOT = ("guard.shadow='snapshot'", "guard.snapshot_every=3")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker-1", "worker-2"])
def test_a_worker_that_is_killed_costs_the_steps_since_the_snapshot_and_no_bit(place, clean, victim):
    process = place.train(*SNAPSHOT)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    os.kill(worker_pid(process, victim), signal.SIGKILL)
    assert process.wait() == 0, process.text

    summary = place.summary()
    assert (summary["lost"], summary["evicted"], summary["verdicts"]) == ([victim], [], [])
    # it may have died a moment later than in the step after the one that was waited for
    assert 0 <= summary["steps_redone"] <= 3
    assert (summary["steps_lost"], summary["false_accusations"]) == (0, 0)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
def test_a_liar_is_named_and_the_run_ends_with_the_bits_of_a_run_with_gradients(place, clean):
    summary = place.finish(*FORWARD_LIAR, *SNAPSHOT, "guard.audit_rate=1.0")

    assert (summary["evicted"], summary["false_accusations"], summary["steps_redone"]) == (["worker-1"], 0, 1)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
def test_a_run_that_is_resumed_between_two_snapshots_goes_on_with_the_same_bits(place, clean):
    # the checkpoint of step 3 is no multiple of four steps
    every_four = ("guard.shadow='snapshot'", "guard.snapshot_every=4")
    process = place.train(*every_four)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    process.kill()

    summary = place.finish(*every_four, resume=True)

    assert summary["resumed_from"] == 3
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
