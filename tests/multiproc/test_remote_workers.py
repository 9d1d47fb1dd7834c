"""Workers that are started elsewhere: they join with certificates, and end when their owner is gone."""

import json
import os
import signal
import socket

import pytest
from real_runs import exists

from phalanx.telemetry import read_metrics

PARTIES = ("owner", "north", "south", "east", "west")


@pytest.fixture
def keys(place):
    """Certificates for all parties, made with the command that users have."""
    for arguments in (["init"], *(["issue", name] for name in PARTIES)):
        process = place.start("pki", arguments[0], str(place.path / "keys"), *arguments[1:])
        assert process.wait() == 0, process.text
    return place.path / "keys"


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def worker_file(place, keys, name, port, extra=""):
    path = place.path / f"{name}.toml"
    path.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n{extra}")
    return str(path)


def remote(keys, port):
    return (
        "pipeline.remote_workers=['north','south']",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
        "pipeline.transport.keepalive_s=1.0",
    )


def bodies(place, kind):
    """What the log says in events of one kind, in order."""
    lines = (place.path / "run" / "events.jsonl").read_text().splitlines()
    # the last line may still be on its way
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["body"] for event in events if event["kind"] == kind]


def movers(place):
    """Parties that have got a stage that was another's before."""
    return {party for body in bodies(place, "stages_moved") for party in body["to"].values()}


@pytest.mark.slow
def test_remote_workers_join_and_end_with_their_owner_and_join_again(place, clean, keys, port):
    hasty = "[transport]\nkeepalive_s = 1.0\ntimeout_s = 8.0\n"
    files = [worker_file(place, keys, name, port, hasty) for name in ("north", "south")]
    workers = [place.start("worker", file) for file in files]
    # neither the run file nor the workers' files say a word of a journal
    place.run_file.write_text(place.run_file.read_text().replace("journal = false\n", ""))
    settings = (*remote(keys, port), "checkpoint.every=0")
    owner = place.train(*settings)
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 3,'))
    assert f"listening on 127.0.0.1:{port}" in owner.text
    assert "north" in owner.text
    owner.kill()

    assert [worker.wait() for worker in workers] == [4, 4], [worker.text for worker in workers]
    assert all("error: the owner at" in worker.text and "Traceback" not in worker.text for worker in workers)

    workers = [place.start("worker", file) for file in files]
    summary = place.finish(*settings, resume=True)
    assert [worker.wait() for worker in workers] == [0, 0], [worker.text for worker in workers]
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    # no checkpoint was ever written: what the workers have kept on their own disks is what it goes on from
    assert summary["resumed_from"] >= 3
    assert summary["steps_lost"] == 0
    assert not list(place.path.glob("*/stage-*.safetensors"))
    assert summary["attacks_injected"] is None


@pytest.mark.slow
def test_a_worker_that_was_killed_is_started_again_and_comes_back(place, keys, port):
    settings = ("train.steps=200", "train.validate_every=500", "checkpoint.every=200")
    undisturbed = place.finish(*settings, "guard.mode='off'", run_dir="undisturbed")
    files = {name: worker_file(place, keys, name, port) for name in ("north", "south")}
    workers = {name: place.start("worker", file) for name, file in files.items()}
    owner = place.train(*settings, *remote(keys, port))
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 3,'))

    workers["north"].kill()
    # at once, before anybody has missed it
    again = place.start("worker", files["north"])
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"party":"north.2"'))
    assert owner.wait() == 0, owner.text

    assert [again.wait(), workers["south"].wait()] == [0, 0], again.text
    summary = place.summary()
    assert [body["party"] for body in bodies(place, "lost")] == ["north"]
    assert (summary["verdicts"], summary["evicted"], summary["steps_lost"]) == ([], [], 0)
    assert summary["final_weights_digest"] == undisturbed["final_weights_digest"]


@pytest.mark.slow
def test_a_run_without_memory_for_its_stages_is_refused_before_its_first_step(place, keys, port):
    wide = ("model.architecture.n_embd=256",)
    files = [worker_file(place, keys, name, port, "memory_mib = 2\n") for name in ("north", "south")]
    workers = [place.start("worker", file) for file in files]
    owner = place.train(*wide, *remote(keys, port))

    assert owner.wait() == 2, owner.text
    assert "memory: the stages do not fit" in owner.text
    assert "north has 2.0 MiB for stages and needs" in owner.text
    assert not place.has_line("metrics.jsonl", '"step"')
    for worker in workers:
        worker.kill()


@pytest.mark.slow
def test_a_worker_with_a_foreign_certificate_is_refused_and_the_run_goes_on(place, clean, keys, port):
    for arguments in (["init"], ["issue", "north"]):
        process = place.start("pki", arguments[0], str(place.path / "foreign"), *arguments[1:])
        assert process.wait() == 0, process.text
    owner = place.train(*remote(keys, port))
    place.wait_for(owner, lambda: "listening on" in owner.text)

    stranger = place.start("worker", worker_file(place, place.path / "foreign", "north", port))
    assert stranger.wait() == 4, stranger.text
    assert "Traceback" not in stranger.text
    assert exists(owner.popen.pid)

    pinned = worker_file(place, keys, "north", port, "run_digest = 'another'\n")
    refusing = place.start("worker", pinned)
    assert refusing.wait() == 2, refusing.text
    assert "run_digest" in refusing.text
    assert owner.popen.poll() is None or owner.popen.returncode == 4


@pytest.mark.slow
def test_a_run_grows_from_two_workers_to_four_and_back_without_a_changed_bit(place, keys, port):
    """Four middle stages: two for each of two workers, then one for each of four, then two again."""
    shape = ("pipeline.stages=6", "model.architecture.n_layer=6", "train.steps=200", "train.validate_every=0")
    settings = (*shape, "checkpoint.every=0", "pipeline.rebalance_every=0")
    undisturbed = place.finish(*settings, "guard.mode='off'", run_dir="undisturbed")
    first = [place.start("worker", worker_file(place, keys, name, port)) for name in ("north", "south")]
    owner = place.train(*settings, *remote(keys, port), "pipeline.may_join=['east','west']")
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 5,'))

    late = {name: place.start("worker", worker_file(place, keys, name, port)) for name in ("east", "west")}
    place.wait_for(owner, lambda: {"east", "west"} <= movers(place))
    for process in late.values():
        os.kill(process.popen.pid, signal.SIGTERM)
    assert owner.wait() == 0, owner.text

    assert [process.wait() for process in (*first, *late.values())] == [0, 0, 0, 0]
    summary = place.summary()
    assert (summary["lost"], summary["evicted"], summary["steps_lost"]) == ([], [], 0)
    assert {body["party"] for body in bodies(place, "left")} == {"east", "west"}
    assert set(bodies(place, "stages_moved")[-1]["to"].values()) <= {"north", "south"}
    losses = [
        [line["loss"] for line in read_metrics(place.path / run / "metrics.jsonl")] for run in ("run", "undisturbed")
    ]
    assert losses[0] == losses[1]
    assert summary["final_weights_digest"] == undisturbed["final_weights_digest"]


@pytest.mark.slow
def test_the_card_of_a_failed_run_has_the_stacks_of_remote_workers(place, keys, port):
    workers = [place.start("worker", worker_file(place, keys, name, port)) for name in ("north", "south")]
    owner = place.train(*remote(keys, port), "optimizer.lr=1e30")

    assert owner.wait() == 6, owner.text

    for worker in workers:
        worker.kill()
    card = json.loads((place.path / "run" / "stacks.json").read_text())
    assert set(card) == {"north", "south"}
    text = (place.path / "run" / "post_mortem.md").read_text()
    for name in ("north", "south"):
        assert f"stack of {name}:\n  as it reports itself:\n  main thread:" in owner.text
        assert f"## Stack of `{name}`" in text
    # where a worker waits for its next message
    assert text.count("process.py:") >= 2
    assert "_serve_messages" in text
    # nothing of where their code lies
    assert str(place.path) not in json.dumps(card)
    assert "/" not in json.dumps(card)


@pytest.mark.slow
def test_a_remote_worker_that_stands_still_says_nothing_and_the_run_goes_on(place, clean, keys, port):
    workers = [place.start("worker", worker_file(place, keys, name, port)) for name in ("north", "south")]
    owner = place.train(*remote(keys, port), "pipeline.patience_s=1.0")
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    os.kill(workers[1].popen.pid, signal.SIGSTOP)

    assert owner.wait() == 0, owner.text

    workers[1].kill()
    assert workers[0].wait() == 0, workers[0].text
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]
    stacks = json.loads((place.path / "run" / "stacks.json").read_text())
    assert list(stacks) == ["south"]
    assert stacks["south"]["error"].startswith("south: deadline_exceeded")
    assert "stack of south:\n  none: south: deadline_exceeded" in owner.text
