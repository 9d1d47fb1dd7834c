"""Real processes come and go: a killed one is started anew, one that gets SIGTERM hands over and leaves."""

import json
import os
import signal

import pytest
from real_runs import exists, worker_pid

ELASTIC = ("train.steps=300", "train.validate_every=500", "pipeline.respawns=2", "checkpoint.every=300")


def kinds(place, *wanted):
    """Bodies of events of these kinds, in order."""
    events = [json.loads(line) for line in (place.path / "run" / "events.jsonl").read_text().splitlines()]
    return [(event["kind"], event["body"]) for event in events if event["kind"] in wanted]


@pytest.mark.slow
def test_a_killed_worker_is_started_anew_and_one_with_notice_leaves_without_a_lost_step(place):
    clean = place.finish(*ELASTIC, "guard.mode='off'", run_dir="clean")

    owner = place.train(*ELASTIC)
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    killed = worker_pid(owner, "worker-1")
    os.kill(killed, signal.SIGKILL)
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"party_joined"', after='"respawned"'))
    leaving = worker_pid(owner, "worker-2")
    os.kill(leaving, signal.SIGTERM)
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"left"'))
    assert owner.wait() == 0, owner.text

    assert not exists(leaving)
    found = kinds(place, "lost", "left", "respawned", "evicted")
    assert [(kind, body["party"]) for kind, body in found] == [
        ("lost", "worker-1"),
        ("respawned", "worker-3"),
        ("left", "worker-2"),
    ]
    summary = place.summary()
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (summary["verdicts"], summary["steps_lost"]) == ([], 0)


@pytest.mark.slow
def test_holder_and_shadow_killed_at_once_cost_the_step_where_there_is_a_second_shadow(place):
    settings = ("pipeline.stages=5", "model.architecture.n_layer=5", "train.steps=40", "checkpoint.every=40")
    clean = place.finish(*settings, "guard.mode='off'", run_dir="clean")

    owner = place.train(*settings, "guard.shadows=2")
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 5,'))
    both = [worker_pid(owner, name) for name in ("worker-1", "worker-2")]
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    assert owner.wait() == 0, owner.text

    assert not any(map(exists, both))
    assert {body["party"] for _, body in kinds(place, "lost")} == {"worker-1", "worker-2"}
    summary = place.summary()
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (summary["verdicts"], summary["steps_lost"], kinds(place, "fell_back")) == ([], 0, [])
