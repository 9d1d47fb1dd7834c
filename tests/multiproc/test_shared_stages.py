"""Two copies of each stage share its microbatches, in processes of their own: one is killed, one lies."""

import os
import signal

import pytest
from real_runs import FORWARD_LIAR, make_place, worker_pid

REPLICA = "guard.shadow='replica'"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Summary of the undisturbed run."""
    summary = make_place(tmp_path_factory.mktemp("shared")).finish(REPLICA)
    assert (summary["evicted"], summary["false_accusations"], summary["takeovers"]) == ([], 0, 0)
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker-1", "worker-2"])
def test_a_copy_that_is_killed_is_replaced_and_no_bit_is_lost(place, shared, victim):
    process = place.train(REPLICA)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    os.kill(worker_pid(process, victim), signal.SIGKILL)
    assert process.wait() == 0, process.text

    summary = place.summary()
    assert summary["lost"] == [victim]
    assert (summary["evicted"], summary["verdicts"], summary["takeovers"]) == ([], [], 2)
    assert summary["final_weights_digest"] == shared["final_weights_digest"]
    assert (summary["steps_lost"], summary["false_accusations"]) == (0, 0)


@pytest.mark.slow
def test_a_copy_that_lies_is_named_and_the_unguarded_run_in_two_lanes_has_the_same_bits(place, shared):
    summary = place.finish(*FORWARD_LIAR, REPLICA)
    alone = place.finish(REPLICA, "guard.mode='off'", run_dir="alone")

    assert (summary["evicted"], summary["false_accusations"]) == (["worker-1"], 0)
    assert summary["final_weights_digest"] == shared["final_weights_digest"] == alone["final_weights_digest"]


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(place, shared):
    process = place.train(REPLICA)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    process.kill()

    summary = place.finish(REPLICA, resume=True)

    assert summary["resumed_from"] == 3
    assert summary["final_weights_digest"] == shared["final_weights_digest"]
