"""A party of another numeric class, or one that says so, is refused at the door or checked like everybody else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import Process, free_port, make_keys

LIAR = str(Path(__file__).with_name("claiming_worker.py"))
MIXED = ("guard.classes='mixed'", "guard.step_audit_rate=0.25", "guard.owner_audit_rate=0.25")
WRONG_UPDATE = "threads = 2\n[attack]\nkind = 'wrong_learning_rate'\nrate = 1.0\nfrom_step = 2\n"


def bodies(place, kind):
    lines = (place.path / "run" / "events.jsonl").read_text().splitlines()
    return [event["body"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def company(place):
    """Starts an owner and two remote workers, of which the first lies; returns the owner, and both by name."""

    def start(*settings, spoils=None, extra="", names=("north", "south")):
        port, keys = free_port(), make_keys(place, "owner", *names)
        workers = {}
        for name in names:
            file, mine = place.path / f"{name}.toml", extra if name == "north" else ""
            file.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n{mine}")
            if name == "north" and spoils is not None:
                workers[name] = python(place, LIAR, str(file), *map(str, spoils))
            else:
                workers[name] = place.start("worker", str(file))
        owner = place.train(
            f"pipeline.remote_workers={list(names)}",
            f"pipeline.pki='{keys}'",
            f"pipeline.transport.port={port}",
            "pipeline.transport.keepalive_s=1.0",
            *settings,
        )
        return owner, workers

    return start


def python(place, *arguments):
    output = place.path / f"output-{len(place.processes)}.txt"
    with output.open("wb") as stream:
        popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    place.processes.append(Process(popen, output))
    return place.processes[-1]


@pytest.mark.parametrize(
    ("lie", "other"),
    [({"spoils": (-1.0, 7)}, "device another build instead of"), ({"extra": WRONG_UPDATE}, "threads 2 instead of 1")],
    ids=["a claimed class", "two threads"],
)
def test_another_class_is_refused_at_the_door_and_everybody_is_told_why(place, company, lie, other):
    owner, workers = company(**lie)

    assert owner.wait() == 2, owner.text
    assert "north computes other bits than the owner" in owner.text
    assert other in owner.text
    assert 'guard.classes = "mixed"' in owner.text
    assert workers["north"].wait() != 0
    assert "north computes other bits than the owner" in workers["north"].text
    assert workers["south"].wait() == 4
    assert "the run does not begin: north computes other bits" in workers["south"].text
    assert [body["party"] for body in bodies(place, "not_let_in")] == ["north"]
    assert bodies(place, "verdict") == []


@pytest.mark.parametrize(
    "lie",
    [{"spoils": (-1.0, 7)}, {"spoils": (1.01, 3)}, {"extra": WRONG_UPDATE}],
    ids=["negated after the last update", "scaled in the middle", "a wrong learning rate on two threads"],
)
def test_in_a_mixed_fleet_it_is_named_and_nobody_else_is(place, company, lie):
    owner, workers = company(*MIXED, **lie)

    assert owner.wait() == 0, owner.text
    assert workers["south"].wait() == 0
    summary = place.summary()
    assert (summary["evicted"], summary["status"]) == (["north"], "completed")
    assert {verdict["party"] for verdict in summary["verdicts"]} == {"north"}
    assert summary["guarantees"] == {"0": "own", "1": "bounded", "2": "bounded", "3": "own"}
    assert "from step 0 on: stage 0 own, stage 1 bounded, stage 2 bounded, stage 3 own" in owner.text
    honest = place.finish("guard.classes='mixed'", "guard.mode='off'", run_dir="honest")
    if "spoils" in lie:
        assert summary["final_weights_digest"] == honest["final_weights_digest"]
    else:
        # before its lie the stage was honest on two threads: other roundings, and the same training
        assert summary["loss_last"] == pytest.approx(honest["loss_last"], rel=1e-4)
    workers["north"].kill()
