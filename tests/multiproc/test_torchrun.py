"""`phalanx launch` on torchrun: the bits of a local run; a dead worker restarts nothing, a dead owner everything."""

import os
import signal

import pytest
from real_runs import descendant, events, exists, free_port, make_keys

pytestmark = pytest.mark.slow
LONG = ("train.steps=80", "train.validate_every=500", "checkpoint.every=80", "pipeline.respawns=1")
NAMES = ("owner", "worker-1", "worker-2", "worker-3")


def launched(place, keys, *overrides, options=(), run_dir="run"):
    settings = [word for override in (f"pipeline.pki='{keys}'", *overrides) for word in ("--set", override)]
    return place.start("launch", str(place.run_file), "--run-dir", str(place.path / run_dir), *settings, *options)


def test_a_launch_has_the_bits_of_a_local_run(place, clean):
    process = launched(place, make_keys(place, *NAMES[:3]))

    assert process.wait() == 0, process.text

    summary = place.summary()
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert summary["audits"] == clean["audits"]
    assert [kind for kind, _ in events(place, "run_started", "run_resumed", "lost")] == ["run_started"]


def test_a_dead_worker_restarts_nothing_and_another_name_comes_in_its_place(place):
    clean = place.finish(*LONG, "guard.mode='off'", run_dir="clean")
    process = launched(place, make_keys(place, *NAMES), *LONG)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    owner = descendant(process, "phalanx train")

    os.kill(descendant(process, "phalanx worker", "/worker-1.toml"), signal.SIGKILL)
    place.wait_for(process, lambda: place.has_line("events.jsonl", '"worker-3"', after='"lost"'))
    assert exists(owner)
    assert process.wait() == 0, process.text

    found = events(place, "run_started", "run_resumed", "lost", "party_joined", "evicted")
    assert [kind for kind, _ in found] == ["run_started", "party_joined", "party_joined", "lost", "party_joined"]
    assert (found[3][1]["party"], found[4][1]["party"]) == ("worker-1", "worker-3")
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]
    assert place.summary()["steps_lost"] == 0


def test_after_the_owners_death_torchrun_restarts_all_and_the_run_goes_on(place, clean):
    process = launched(place, make_keys(place, *NAMES[:3]))
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    worker = descendant(process, "phalanx worker", "/worker-1.toml")

    os.kill(descendant(process, "phalanx train"), signal.SIGKILL)
    assert process.wait() == 0, process.text

    assert not exists(worker)
    summary = place.summary()
    assert summary["resumed_from"] == 3
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    found = events(place, "run_started", "run_resumed", "run_completed", "lost")
    assert [kind for kind, _ in found] == ["run_started", "run_resumed", "run_completed"]


def test_an_owner_that_would_fail_again_is_not_started_again(place):
    process = launched(place, make_keys(place, *NAMES[:3]), "data.max_documents=1")

    assert process.wait() == 3, process.text

    assert process.text.count("error: ") == 1


def test_sigterm_ends_a_launch_and_leaves_a_run_that_can_go_on(place, clean):
    keys = make_keys(place, *NAMES[:3])
    process = launched(place, keys, options=("--max-restarts", "0"))
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    owner = descendant(process, "phalanx train")
    worker = descendant(process, "phalanx worker", "/worker-1.toml")

    process.popen.terminate()

    assert process.wait() == 130, process.text
    assert not exists(owner)
    assert not exists(worker)
    assert place.summary()["status"] == "interrupted"
    process = launched(place, keys, options=("--resume",))
    assert process.wait() == 0, process.text
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]


def test_two_machines_find_each_other_through_the_rendezvous(place, clean):
    keys = make_keys(place, *NAMES[:3])
    # two machines on one: they listen on all interfaces, as two would, and meet on loopback
    both = ("pipeline.transport.bind='0.0.0.0'",)
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--advertise", "127.0.0.1")
    first = launched(place, keys, *both, options=(*meet, "--party", "owner", "--party", "worker-1"))
    second = launched(place, keys, *both, options=(*meet, "--party", "worker-2"))

    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text

    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]
