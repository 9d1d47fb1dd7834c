"""Processes that die: the owner at any moment, or one worker; no bit of the result shows it."""

import os
import random
import signal
import time

import pytest
from real_runs import (
    FORWARD_LIAR,
    JOURNAL,
    children_of,
    end_all,
    events,
    exists,
    local_workers,
    make_place,
    worker_pid,
)

from machine_patience import patience_s
from phalanx.lab.bench.chaos.run_process import descendant_pids
from phalanx.security.audit import LogHead, verify_log
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics
from phalanx.train.records.proof import verify_run

STEPS = list(range(8))


def assert_like(place, summary, clean, *, steps_lost=0):
    """The run ended as the undisturbed one did, and its logs are whole."""
    for key in ("final_weights_digest", "loss_first", "loss_last", "steps", "tokens", "audits", "status"):
        assert summary[key] == clean[key], key
    for key in ("validation_perplexity", "validation_perplexity_first"):
        assert summary[key] == clean[key], key
    assert (summary["steps_lost"], summary["false_accusations"]) == (steps_lost, 0)
    assert [line["step"] for line in read_metrics(place.path / "run" / "metrics.jsonl")] == STEPS
    owner = load_identity(place.path / "run" / "pki" / "owner").public
    kinds = verify_log(place.path / "run" / "events.jsonl", owner, LogHead(**summary["audit_log_head"])).kinds
    assert kinds["run_completed"] == 1
    # the key outlives a killed owner as a secret, and at the end proves the steps of all sessions
    proof = verify_run(place.path / "run")
    assert (proof.steps, proof.proven, proof.unproven) == (len(STEPS), len(STEPS), ())


def kill_owner(place, process):
    """SIGKILL, and wait until the workers have followed."""
    workers = descendant_pids(process.popen.pid)
    process.kill()
    deadline = time.monotonic() + patience_s(10.0)
    while [pid for pid in workers if exists(pid)]:
        assert time.monotonic() < deadline, "a worker outlived its owner"
        time.sleep(0.01)


def whole_and_killed(tmp_path, prepare, step, learned, *settings):
    """End a run twice, undisturbed and with an owner that is killed once a step is in its metrics.

    Args:
        tmp_path: Of both runs.
        prepare: Writes what a place needs.
        step: The step that is seen before the kill; a checkpoint of step 3 or later must be there by then.
        learned: Reads from a place what must be equal beside the weights.
        settings: Overrides of the run file.

    Returns:
        The digest of the weights and what was learned, of either run.
    """
    found = []
    for is_killed in (False, True):
        home = tmp_path / ("killed" if is_killed else "whole")
        home.mkdir()
        place = make_place(home)
        prepare(place)
        if is_killed:
            process = place.train(*settings)
            place.wait_for(process, lambda place=place: place.has_line("metrics.jsonl", f'"step": {step},'))
            kill_owner(place, process)
        summary = place.finish(*settings, resume=is_killed)
        found.append((summary["final_weights_digest"], learned(place)))
        end_all(place)
    assert summary["resumed_from"] >= 3
    return found


@pytest.mark.slow
def test_an_owner_that_is_killed_in_the_middle_of_a_run_goes_on(place, clean):
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    kill_owner(place, process)

    summary = place.finish(resume=True)

    assert summary["resumed_from"] == 3
    # without a journal the steps since the checkpoint are made again, and counted
    assert summary["steps_lost"] >= 2
    assert_like(place, summary, clean, steps_lost=summary["steps_lost"])


@pytest.mark.slow
def test_an_owner_that_is_killed_goes_on_at_the_step_where_it_died_with_what_all_processes_kept(place, clean):
    process = place.train(JOURNAL, "checkpoint.every=0")
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 5,'))
    kill_owner(place, process)

    summary = place.finish(JOURNAL, "checkpoint.every=0", resume=True)

    assert summary["resumed_from"] >= 5
    assert_like(place, summary, clean)
    assert not (place.path / "run" / "journal").exists()


@pytest.mark.slow
def test_a_liar_that_was_evicted_before_the_owner_died_is_in_no_bit_of_what_goes_on(place, clean):
    settings = (*FORWARD_LIAR, JOURNAL, "checkpoint.every=0", "guard.audit_rate=1.0")
    process = place.train(*settings)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 5,'))
    kill_owner(place, process)
    log = (place.path / "run" / "workers" / "worker-1.log").stat()

    summary = place.finish(*settings, resume=True)

    assert summary["resumed_from"] >= 5
    assert summary["evicted"] == ["worker-1"]
    assert "worker-1 was evicted earlier and stays excluded" in place.processes[-1].text
    assert (place.path / "run" / "workers" / "worker-1.log").stat().st_mtime_ns == log.st_mtime_ns
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert not (place.path / "run" / "journal").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.toml", "[model"),
        ("pki/owner/certificate.pem", "BEGIN"),
        ("run.json", "run"),
        ("events.jsonl", "run_started"),
        ("events.jsonl", "party_joined"),
        ("metrics.jsonl", '"step": 0,'),
        ("events.jsonl", '"checkpoint"'),
        ("metrics.jsonl", '"step": 7,'),
        ("events.jsonl", "run_completed"),
    ],
)
def test_an_owner_can_be_killed_at_each_stage_of_its_life(place, clean, name, words):
    process = place.train()
    place.wait_for(process, lambda: place.has_line(name, words))
    kill_owner(place, process)

    assert_like_after_end(place, place.finish(resume=True), clean)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_an_owner_can_be_killed_at_random_moments_again_and_again(place, clean, seed):
    moments, settings = random.Random(seed), (JOURNAL,) if seed % 2 else ()
    begun = place.path / "run" / ".begun"
    for _ in range(3):
        process = place.train(*settings, resume=begun.exists() or (place.path / "run" / "run.json").exists())
        deadline = time.monotonic() + moments.uniform(2.0, 16.0)
        while time.monotonic() < deadline and process.popen.poll() is None:
            time.sleep(0.01)
        if process.popen.poll() is None:
            kill_owner(place, process)
    resume = begun.exists() or (place.path / "run" / "run.json").exists()

    assert_like_after_end(place, place.finish(*settings, resume=resume), clean)


def assert_like_after_end(place, summary, clean):
    """As `assert_like`, but the crash may have come when everything was done and noted."""
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (summary["steps"], summary["tokens"], summary["audits"]) == (
        clean["steps"],
        clean["tokens"],
        clean["audits"],
    )
    assert summary["validation_perplexity"] == clean["validation_perplexity"]
    assert [line["step"] for line in read_metrics(place.path / "run" / "metrics.jsonl")] == STEPS
    owner = load_identity(place.path / "run" / "pki" / "owner").public
    verify_log(place.path / "run" / "events.jsonl", owner, LogHead(**summary["audit_log_head"]))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker-1", "worker-2"])
def test_a_worker_that_is_killed_is_replaced_and_not_blamed(place, clean, victim):
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    os.kill(worker_pid(process, victim), signal.SIGKILL)
    assert process.wait() == 0, process.text

    summary = place.summary()
    assert summary["lost"] == [victim]
    assert (summary["evicted"], summary["verdicts"], summary["takeovers"] >= 1) == ([], [], True)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (summary["steps_lost"], summary["false_accusations"]) == (0, 0)


@pytest.mark.slow
def test_a_crash_between_eviction_and_checkpoint_lets_nobody_back_in(place, clean):
    process = place.train(*FORWARD_LIAR)
    place.wait_for(process, lambda: place.has_line("events.jsonl", '"kind":"verdict"'))
    kill_owner(place, process)
    log = (place.path / "run" / "workers" / "worker-1.log").stat()

    summary = place.finish(*FORWARD_LIAR, resume=True)

    assert "worker-1 was evicted earlier and stays excluded" in place.processes[-1].text
    assert (place.path / "run" / "workers" / "worker-1.log").stat().st_mtime_ns == log.st_mtime_ns
    found = events(place, "run_resumed", "party_joined")
    resumed = [kind for kind, _ in found].index("run_resumed")
    assert [body["party"] for _, body in found[resumed + 1 :]] == ["worker-2"]
    assert summary["resumed_from"] == 3
    assert [verdict["party"] for verdict in summary["verdicts"]] == ["worker-1"]
    assert (summary["attacks_injected"], summary["detections"], summary["false_accusations"]) == (1, 1, 0)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.mark.slow
def test_an_owner_that_is_killed_while_a_checkpoint_is_under_way_goes_on_from_the_last_good_one(place, clean):
    process = place.train(ASYNCHRONOUS)
    place.wait_for(process, lambda: place.has_line("events.jsonl", '"kind":"checkpoint"'))
    kill_owner(place, process)

    summary = place.finish(ASYNCHRONOUS, resume=True)

    assert summary["resumed_from"] in (0, 3)
    assert_like_after_end(place, summary, clean)


@pytest.mark.slow
def test_a_worker_that_dies_while_its_state_travels_costs_no_bit_and_no_checkpoint(place, clean):
    process = place.train(ASYNCHRONOUS)
    place.wait_for(process, lambda: place.has_line("events.jsonl", '"kind":"checkpoint"'))
    os.kill(worker_pid(process, "worker-1"), signal.SIGKILL)
    assert process.wait() == 0, process.text

    summary = place.summary()
    assert (summary["lost"], summary["evicted"]) == (["worker-1"], [])
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (place.path / "run" / "checkpoints" / "step-00000008").exists()


@pytest.mark.slow
def test_a_liar_that_is_convicted_while_checkpoints_are_under_way_leaves_no_trace_in_any(place, clean):
    summary = place.finish(*FORWARD_LIAR, ASYNCHRONOUS, "checkpoint.every=1", "guard.keep_states=2")

    assert [verdict["party"] for verdict in summary["verdicts"]] == ["worker-1"]
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    names = sorted(path.name for path in (place.path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000007", "step-00000008"]


@pytest.mark.slow
def test_ctrl_c_and_then_a_full_disk_and_then_a_good_end(place, clean):
    process = place.train(anew=True)
    # looked up while they import what they need: the search takes longer than the rest of the run on a busy machine
    place.wait_for(process, lambda: local_workers(process).keys() == {"worker-1", "worker-2"})
    workers = local_workers(process).values()
    (server,) = children_of(process.popen.pid)
    assert sorted(children_of(server)) == sorted(workers), "each worker has imported everything by itself"
    place.wait_for(process, (place.path / "run" / "checkpoints" / "step-00000003").exists)
    os.killpg(process.popen.pid, signal.SIGINT)
    assert process.wait() == 130, process.text
    assert "Traceback" not in process.text
    assert place.summary()["status"] == "interrupted"
    assert [pid for pid in workers if exists(pid)] == []

    process = place.train(resume=True, restriction="no_large_files")
    assert process.wait() == 3, process.text
    # one checkpoint less is no reason to stop; without the last one there is no result
    assert "no checkpoint of step 6, training continues" in process.text
    assert "step 8 cannot be saved" in process.text
    assert "Traceback" not in process.text
    assert (place.summary()["status"], place.summary()["steps"]) == ("failed", 8)
    assert [path.name for path in (place.path / "run" / "checkpoints").iterdir()] == ["step-00000003"]

    # the disk took no checkpoint of the steps 4 to 8
    assert_like(place, place.finish(resume=True), clean, steps_lost=5)
