"""A pipeline of parties that are domains: the run file gives each its layout, and any rank may die."""

import json
import os
import signal
from pathlib import Path

import pytest
from real_runs import children_of, worker_pid

FIVE = ("model.architecture.n_layer=5", "train.steps=12")
PARTIES = (
    *FIVE,
    "pipeline.stages=5",
    "guard.classes='mixed'",
    "pipeline.layouts.worker-1.tp=2",
    "pipeline.layouts.worker-2.dp=2",
    "pipeline.layouts.worker-2.zero=2",
)


def losses(place, run_dir):
    lines = map(json.loads, (place.path / run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def parties_of(place, kind):
    lines = map(json.loads, (place.path / "run" / "events.jsonl").read_text().splitlines())
    return [event["body"]["party"] for event in lines if event["kind"] == kind]


def command_lines():
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().decode())
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_parties_of_three_layouts_have_the_losses_of_one_process(place):
    place.finish(*FIVE, "pipeline.stages=2", run_dir="alone")

    summary = place.finish(*PARTIES, "guard.audit_rate=1.0", "guard.step_audit_rate=0.5")

    assert (summary["verdicts"], summary["evicted"], summary["takeovers"]) == ([], [], 0)
    assert summary["audits"] > 0
    assert losses(place, "run") == pytest.approx(losses(place, "alone"), abs=1e-6, rel=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parties_of_ranks_train_an_adapter_beside_frozen_weights_as_one_process_does(place):
    adapter = ("model.adapter.rank=4",)
    place.finish(*FIVE, *adapter, "pipeline.stages=2", run_dir="alone")

    summary = place.finish(*PARTIES, *adapter, "guard.audit_rate=1.0", "guard.step_audit_rate=0.5")

    assert (summary["verdicts"], summary["evicted"], summary["takeovers"]) == ([], [], 0)
    assert summary["audits"] > 0
    assert losses(place, "run") == pytest.approx(losses(place, "alone"), abs=1e-6, rel=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_is_its_party_and_a_party_of_as_many_ranks_is_started_in_its_place(place):
    settings = (
        *(*PARTIES, "pipeline.layouts.worker-4.dp=2", "pipeline.layouts.worker-4.zero=2"),
        *("train.steps=200", "train.validate_every=500", "checkpoint.every=0"),
        *("pipeline.respawns=1", "pipeline.transport.keepalive_s=1.0"),
    )
    owner = place.train(*settings)
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    (rank,) = children_of(worker_pid(owner, "worker-2"))

    os.kill(rank, signal.SIGKILL)

    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"party_joined"', after='"respawned"'))
    assert any(line.endswith("worker-4.toml\0") and str(place.path) in line for line in command_lines())
    assert owner.wait() == 0, owner.text
    summary = place.summary()
    assert (parties_of(place, "lost"), parties_of(place, "respawned")) == (["worker-2"], ["worker-4"])
    assert (summary["steps"], summary["verdicts"], summary["steps_lost"]) == (200, [], 0)
    assert "rank 1 ended with signal 9" in (place.path / "run" / "workers" / "worker-2.log").read_text()
