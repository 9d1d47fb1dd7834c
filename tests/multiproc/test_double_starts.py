"""Two processes with one certificate, before the first step: one of them works, and no other worker is stopped."""

import os
import signal

import pytest
from real_runs import events, free_port, make_keys

STAGES = ("pipeline.stages=4", "train.steps=12")


@pytest.fixture
def keys(place):
    return make_keys(place, "owner", "north", "south", "east")


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def start(place, keys, port):
    """Start a worker process by the name in its certificate."""

    def start_one(name):
        path = place.path / f"{name}.toml"
        path.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n")
        return place.start("worker", str(path))

    return start_one


def remote(keys, port, *names, late=()):
    return (
        f"pipeline.remote_workers={list(names)}",
        f"pipeline.may_join={list(late)}",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
        "pipeline.transport.keepalive_s=1.0",
    )


def ended_well(place, owner, *others):
    assert owner.wait() == 0, owner.text
    summary = place.summary()
    assert [process.wait() for process in others] == [0] * len(others), [process.text for process in others]
    assert (summary["status"], summary["steps"], summary["verdicts"]) == ("completed", 12, [])
    return summary


def joined(place):
    path = place.path / "run" / "events.jsonl"
    return [body["party"] for _, body in events(place, "party_joined")] if path.exists() else []


@pytest.mark.slow
def test_a_second_process_that_comes_while_roles_are_given_out_stops_nobody_else(place, keys, port, start):
    second = start("north")
    place.wait_until(lambda: second.popen.poll() is None)
    os.kill(second.popen.pid, signal.SIGSTOP)
    first, south = start("north"), start("south")
    owner = place.train(*STAGES, *remote(keys, port, "north", "south"))
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"party_joined"'))
    # the first one does not get ready before the second one is there
    os.kill(first.popen.pid, signal.SIGSTOP)
    os.kill(second.popen.pid, signal.SIGCONT)

    summary = ended_well(place, owner, south)

    assert summary["lost"] == ["north"]
    assert not place.has_line("output-0.txt", "Traceback", run_dir=".")


@pytest.mark.slow
@pytest.mark.parametrize("doubled", ["north", "east"], ids=["a stage", "a spare"])
def test_two_processes_from_the_very_start_stop_nobody_else(place, keys, port, start, doubled):
    others = [start(name) for name in ("north", "south", "east")]
    twin = start(doubled)
    owner = place.train(*STAGES, *remote(keys, port, "north", "south", "east"))

    honest = [process for name, process in zip(("north", "south", "east"), others, strict=True) if name != doubled]
    summary = ended_well(place, owner, *honest)

    assert set(summary["lost"]) <= {doubled, f"{doubled}.2"}
    assert "Traceback" not in twin.text


@pytest.mark.slow
def test_a_second_process_during_setup_waits_and_takes_the_place_of_the_first(place, keys, port, start):
    owner = place.train(*STAGES, *remote(keys, port, "north", "south"))
    place.wait_for(owner, lambda: "listening on" in owner.text)
    first = start("north")
    # the owner still waits for the other one; the second process asks again until the first is given up
    place.wait_for(owner, lambda: first.popen.poll() is None)
    second, south = start("north"), start("south")

    summary = ended_well(place, owner, south)

    assert set(summary["lost"]) <= {"north", "north.2"}
    assert "Traceback" not in first.text + second.text


@pytest.mark.slow
def test_a_late_joiner_that_is_started_twice_stops_nobody(place, keys, port, start):
    workers = [start("north"), start("south")]
    twins = [start("east"), start("east")]
    owner = place.train(*STAGES, *remote(keys, port, "north", "south", late=("east",)))

    summary = ended_well(place, owner, *workers)

    assert not {"north", "south"} & set(summary["lost"])
    assert all("Traceback" not in twin.text for twin in twins)


@pytest.mark.slow
def test_a_worker_that_never_takes_its_roles_is_left_out_and_the_run_begins(place, keys, port, start):
    north, south = start("north"), start("south")
    owner = place.train(*STAGES, *remote(keys, port, "north", "south"), "pipeline.step_timeout_s=20.0")
    place.wait_for(owner, lambda: place.has_line("events.jsonl", '"party_joined"'))
    os.kill(north.popen.pid, signal.SIGSTOP)

    summary = ended_well(place, owner, south)

    assert summary["lost"] == ["north"]
