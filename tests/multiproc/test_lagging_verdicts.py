"""Real processes with verdicts that are one step behind: a liar or a SIGKILL leaves no trace in the weights."""

import os
import signal

import pytest
from real_runs import FORWARD_LIAR, worker_pid

LAG = ("guard.commit_lag=1", "guard.screen=false")


# in one process `test_a_lie_that_was_applied_is_undone_and_its_author_named` is the quick one of this kind
@pytest.mark.slow
def test_a_liar_whose_step_may_have_been_applied_leaves_no_trace_in_the_weights(place, clean):
    summary = place.finish(*FORWARD_LIAR, *LAG)

    assert (summary["status"], summary["evicted"], summary["false_accusations"]) == ("completed", ["worker-1"], 0)
    assert [(verdict["party"], verdict["step"]) for verdict in summary["verdicts"]] == [("worker-1", 4)]
    # how far the audits were behind is a matter of speed; that they were never two steps behind is not
    assert summary["steps_redone"] in (0, 1)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert summary["validation_perplexity"] == clean["validation_perplexity"]


@pytest.mark.slow
def test_a_worker_that_is_killed_while_verdicts_lag_is_replaced_and_not_blamed(place, clean):
    process = place.train(*LAG)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    os.kill(worker_pid(process, "worker-1"), signal.SIGKILL)

    assert process.wait() == 0, process.text
    summary = place.summary()
    assert (summary["status"], summary["evicted"], summary["verdicts"]) == ("completed", [], [])
    assert summary["takeovers"] >= 1
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
