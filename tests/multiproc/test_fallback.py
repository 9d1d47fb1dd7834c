"""A stage that no party can serve any more: the run goes back to its checkpoint and ends with the same bits."""

import os
import signal

import pytest
from real_runs import worker_pid

from phalanx.security.audit import LogHead, verify_log
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics


def fell_back(place, summary, clean):
    """The summary tells an undisturbed run but for the lost steps; what the log says of the fallback is returned."""
    # with less workers there is less to audit
    for key in ("final_weights_digest", "loss_first", "loss_last", "steps", "tokens", "validation_perplexity"):
        assert summary[key] == clean[key], key
    assert (summary["status"], summary["resumed_from"], summary["false_accusations"]) == ("completed", None, 0)
    assert [line["step"] for line in read_metrics(place.path / "run" / "metrics.jsonl")] == list(range(8))
    owner = load_identity(place.path / "run" / "pki" / "owner").public
    kinds = verify_log(place.path / "run" / "events.jsonl", owner, LogHead(**summary["audit_log_head"])).kinds
    return kinds["fell_back"]


@pytest.mark.slow
def test_both_holders_of_a_stage_are_killed_at_once_and_the_run_goes_back_to_its_checkpoint(place, clean):
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    for pid in [worker_pid(process, name) for name in ("worker-1", "worker-2")]:
        os.kill(pid, signal.SIGKILL)

    assert process.wait() == 0, process.text
    summary = place.summary()

    assert fell_back(place, summary, clean) == 1
    assert sorted(summary["lost"]) == ["worker-1", "worker-2"]
    assert 1 <= summary["steps_lost"] <= 5


@pytest.mark.slow
def test_without_a_checkpoint_such_a_run_ends_and_says_what_to_do(place):
    process = place.train("checkpoint.every=0")
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    for pid in [worker_pid(process, name) for name in ("worker-1", "worker-2")]:
        os.kill(pid, signal.SIGKILL)

    assert process.wait() == 6, process.text
    assert "--resume" in process.text
    assert sorted(place.summary()["lost"]) == ["worker-1", "worker-2"]
