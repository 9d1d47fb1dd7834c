"""Machines that hang, crawl or cannot be reached any more: the run ends right, and no party is called malicious."""

import contextlib
import json
import os
import signal
import socket
import time

import pytest
from network_lab import Lab
from real_runs import end_all, make_place, worker_pid

from machine_patience import patience_s

LONG = ("train.steps=60", "train.validate_every=1000", "checkpoint.every=10")
OWNER, NORTH, SOUTH = "owner", "north", "south"


@pytest.fixture(scope="module")
def long_digest(tmp_path_factory):
    """Final weights of the long run, undisturbed and unguarded."""
    place = make_place(tmp_path_factory.mktemp("long"))
    yield place.finish(*LONG, "guard.mode='off'")["final_weights_digest"]
    end_all(place)


def reasons(place):
    """Why parties were suspected, by name."""
    path = place.path / "run" / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {e["body"]["party"]: e["body"]["reason"] for e in events if e["kind"] == "link_broken"}


def assert_nobody_blamed(summary, digest, *, lost=()):
    assert summary["final_weights_digest"] == digest
    assert (summary["status"], summary["lost"]) == ("completed", list(lost))
    assert (summary["verdicts"], summary["evicted"], summary["false_accusations"] or 0) == ([], [], 0)
    assert summary["steps_lost"] == 0


def past_step(place, number):
    return lambda: place.has_line("metrics.jsonl", f'"step": {number},')


# --- workers that hang or crawl ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_stage_that_is_stopped_for_30_seconds_is_waited_for(place, long_digest):
    owner = place.train(*LONG, "pipeline.patience_s=60.0")
    place.wait_for(owner, past_step(place, 5))
    stopped = worker_pid(owner, "worker-1")
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(30.0)
    os.kill(stopped, signal.SIGCONT)
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest)
    assert place.summary()["takeovers"] == 0


@pytest.mark.slow
def test_a_stage_that_is_stopped_for_longer_than_patience_is_replaced_and_its_place_is_taken_again(place, long_digest):
    owner = place.train(*LONG, "pipeline.patience_s=2.0", "pipeline.respawns=1")
    place.wait_for(owner, past_step(place, 5))
    os.kill(worker_pid(owner, "worker-1"), signal.SIGSTOP)
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest, lost=["worker-1"])
    assert "silent" in reasons(place)["worker-1"]
    assert place.has_line("events.jsonl", '"in_place_of":"worker-1"')


@pytest.mark.slow
def test_a_stage_that_is_five_times_slower_stays(place, long_digest):
    owner = place.train(*LONG, "pipeline.patience_s=2.0")
    place.wait_for(owner, past_step(place, 5))
    slow = worker_pid(owner, "worker-1")
    # it ends before its owner does
    with contextlib.suppress(ProcessLookupError):
        while owner.popen.poll() is None:
            # four fifths of the time it does nothing
            for order, seconds in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.05)):
                os.kill(slow, order)
                time.sleep(seconds)
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest)


@pytest.mark.slow
def test_an_owner_that_is_stopped_itself_blames_and_replaces_nobody(place, long_digest):
    owner = place.train(*LONG, "pipeline.patience_s=2.0")
    place.wait_for(owner, past_step(place, 5))
    os.kill(owner.popen.pid, signal.SIGSTOP)
    time.sleep(8.0)
    os.kill(owner.popen.pid, signal.SIGCONT)
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest)


# --- workers elsewhere --------------------------------------------------------------------------------


@pytest.fixture
def keys(place):
    for arguments in (["init"], *(["issue", name] for name in (OWNER, NORTH, SOUTH))):
        process = place.start("pki", arguments[0], str(place.path / "keys"), *arguments[1:])
        assert process.wait() == 0, process.text
    return place.path / "keys"


def begin(place, keys, port, *overrides, lab=None, timeout_s=8.0, resume=False):
    """Start two remote workers and their owner, in a lab or on this machine."""
    hosts = {name: "127.0.0.1" if lab is None else lab.address(name) for name in (OWNER, NORTH, SOUTH)}
    bind = "127.0.0.1" if lab is None else "0.0.0.0"
    workers = {}
    for name in (NORTH, SOUTH):
        path = place.path / f"{name}.toml"
        path.write_text(
            f"identity = '{keys / name}'\nowner = '{hosts[OWNER]}:{port}'\nadvertise = '{hosts[name]}'\n"
            f"[transport]\nbind = '{bind}'\nkeepalive_s = 2.0\ntimeout_s = {timeout_s}\n"
        )
        workers[name] = place.start("worker", str(path), inside=() if lab is None else lab.inside(name))
    owner = place.train(
        f"pipeline.remote_workers=['{NORTH}','{SOUTH}']",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.bind='{bind}'",
        f"pipeline.transport.port={port}",
        "pipeline.transport.keepalive_s=2.0",
        f"pipeline.transport.timeout_s={timeout_s}",
        *overrides,
        resume=resume,
        inside=() if lab is None else lab.inside(OWNER),
    )
    return owner, workers


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_a_remote_worker_that_wakes_after_it_was_replaced_ends_by_itself_and_may_come_again(
    place, keys, port, long_digest
):
    impatient = (*LONG, "pipeline.patience_s=2.0")
    owner, workers = begin(place, keys, port, *impatient)
    place.wait_for(owner, past_step(place, 12))
    workers[NORTH].popen.send_signal(signal.SIGSTOP)
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"kind":"lost"'))
    workers[NORTH].popen.send_signal(signal.SIGCONT)
    assert workers[NORTH].wait() == 4, workers[NORTH].text
    assert "continues without this worker" in workers[NORTH].text
    assert "Traceback" not in workers[NORTH].text
    owner.popen.send_signal(signal.SIGINT)
    assert (owner.wait(), workers[SOUTH].wait()) == (130, 4), owner.text
    assert (place.summary()["lost"], place.summary()["evicted"]) == ([NORTH], [])

    owner, workers = begin(place, keys, port, *impatient, resume=True)
    assert owner.wait() == 0, owner.text
    assert [worker.wait() for worker in workers.values()] == [0, 0]
    assert place.has_line("events.jsonl", '"address"', after='"run_resumed"')
    assert place.has_line("events.jsonl", f'"party":"{NORTH}"', after='"run_resumed"')
    assert_nobody_blamed(place.summary(), long_digest, lost=[NORTH])


@pytest.mark.slow
def test_a_remote_worker_that_is_killed_is_missed_before_patience_is_at_its_end(place, keys, port, long_digest):
    owner, workers = begin(place, keys, port, *LONG, "pipeline.patience_s=30.0", timeout_s=60.0)
    place.wait_for(owner, past_step(place, 5))
    workers[NORTH].kill()
    began = time.monotonic()
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"kind":"lost"'))
    assert time.monotonic() - began < 20.0
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest, lost=[NORTH])
    assert "refused" in reasons(place)[NORTH].lower()


# --- networks that lose, delay and cut ------------------------------------------------------------------


@pytest.fixture
def lab(place):
    """Depends on `place`, so that all processes have ended before their network does."""
    network = Lab((OWNER, NORTH, SOUTH))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(network.running())
        except OSError as exc:
            pytest.skip(f"no network namespaces of our own here: {exc}")
        yield network


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[(NORTH, SOUTH)], [(SOUTH, NORTH)], [(NORTH, SOUTH), (SOUTH, NORTH)]])
def test_two_workers_that_cannot_reach_each_other_stay_and_the_owner_carries(place, keys, lab, long_digest, cuts):
    owner, workers = begin(place, keys, 7070, *LONG, "pipeline.patience_s=4.0", lab=lab)
    place.wait_for(owner, past_step(place, 5))
    for sender, receiver in cuts:
        lab.cut(sender, receiver)
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest)
    assert all(lab.dropped[way] for way in cuts)
    assert [workers[name].wait() for name in (NORTH, SOUTH)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[(NORTH, OWNER)], [(OWNER, NORTH)], [(NORTH, OWNER), (OWNER, NORTH)]])
def test_a_worker_that_is_cut_off_from_the_owner_is_replaced_and_ends(place, keys, lab, long_digest, cuts):
    owner, workers = begin(place, keys, 7070, *LONG, "pipeline.patience_s=4.0", lab=lab)
    place.wait_for(owner, past_step(place, 5))
    for sender, receiver in cuts:
        lab.cut(sender, receiver)
    assert owner.wait() == 0, owner.text

    assert_nobody_blamed(place.summary(), long_digest, lost=[NORTH])
    assert all(lab.dropped[way] for way in cuts)
    assert [workers[name].wait() for name in (NORTH, SOUTH)] == [4, 0], workers[NORTH].text
    assert "Traceback" not in workers[NORTH].text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_over_lines_that_delay_and_lose_packets_is_slower_and_nothing_else(place, keys, lab, clean):
    lab.everywhere(delay_s=0.1, loss=0.01)

    owner, _ = begin(place, keys, 7070, lab=lab, timeout_s=60.0)
    assert owner.popen.wait(patience_s(500.0)) == 0, owner.text

    assert_nobody_blamed(place.summary(), clean["final_weights_digest"])
    assert sum(lab.dropped.values()) > 0
