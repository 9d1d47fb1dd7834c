"""A party of another numeric class, or one that says so, is refused at joining or checked like all others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import free_port, make_keys, worker_program

LIAR = str(Path(__file__).with_name("claiming_worker.py"))
MIXED = ("guard.classes='mixed'", "guard.step_audit_rate=0.25", "guard.owner_audit_rate=0.25")
INSTRUCTION_SETS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
PROBE = """
import hashlib, torch
x = (1 / torch.arange(1, 8193)).reshape(64, 128) - 0.01
y = torch.nn.functional.gelu(x @ x.T).softmax(1) @ x
print(hashlib.sha256(y.numpy().tobytes()).hexdigest())
"""
WRONG_UPDATE = {"extra": "threads = 2\n", "attack": "kind = 'wrong_learning_rate'\nrate = 1.0\nfrom_step = 2\n"}


def bodies(place, kind):
    lines = (place.path / "run" / "events.jsonl").read_text().splitlines()
    return [event["body"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def company(place):
    """Starts an owner and two remote workers, of which the first lies; returns the owner, and both by name."""

    def start(*settings, spoils=None, attack=None, extra="", kernels=None, names=("north", "south")):
        port, keys = free_port(), make_keys(place, "owner", *names)
        workers = {}
        for name in names:
            file, mine = place.path / f"{name}.toml", extra if name == "north" else ""
            file.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n{mine}")
            is_liar = name == "north"
            program = worker_program(file, attack if is_liar else None)
            if is_liar and spoils is not None:
                program = (LIAR, str(file), *map(str, spoils))
            variables = kernels or {} if name == "north" else {}
            given = (f"{variable}={value}" for variable, value in variables.items())
            workers[name] = place.start_program("env", *given, sys.executable, *program)
        owner = place.train(
            f"pipeline.remote_workers={list(names)}",
            f"pipeline.pki='{keys}'",
            f"pipeline.transport.port={port}",
            "pipeline.transport.keepalive_s=1.0",
            *settings,
        )
        return owner, workers

    return start


def bits_of(variables):
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | variables, stdout=subprocess.PIPE, check=True
    )
    return probe.stdout


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request):
    """Variables that have torch, MKL and oneDNN use the instructions of an older processor."""
    found = INSTRUCTION_SETS[request.param]
    if bits_of(found) == bits_of({}):
        pytest.skip(f"this machine computes the same bits with {found}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "other"),
    [
        ({"spoils": (-1.0, 7)}, "device another build instead of"),
        pytest.param(WRONG_UPDATE, "threads 2 instead of 1", marks=pytest.mark.slow),
    ],
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
    assert "the run cannot begin: north computes other bits" in workers["south"].text
    assert [body["party"] for body in bodies(place, "not_let_in")] == ["north"]
    assert bodies(place, "verdict") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    # really on other kernels; lies of parties that only claim another class are quick in `test_two_numeric_classes.py`
    [
        pytest.param({"spoils": (-1.0, 7)}, marks=pytest.mark.slow),
        pytest.param({"spoils": (1.01, 3)}, marks=pytest.mark.slow),
        pytest.param(WRONG_UPDATE, marks=pytest.mark.slow),
    ],
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


@pytest.mark.slow
def test_another_instruction_set_is_refused_at_the_door_by_name(place, company, kernels):
    owner, workers = company(kernels=kernels)

    assert owner.wait() == 2, owner.text
    # in which of the four computations bits differ, the two processors decide
    assert re.search(r"north computes other bits than the owner \((forward|backward|gradient|update)[,)]", owner.text)
    assert f"instructions {kernels['ATEN_CPU_CAPABILITY'].upper()} instead of" in owner.text
    assert workers["south"].wait() == 4
    assert [body["party"] for body in bodies(place, "not_let_in")] == ["north"]
    assert bodies(place, "verdict") == []


@pytest.mark.slow
def test_honest_parties_of_two_instruction_sets_train_together(place, company, kernels):
    owner, workers = company(*MIXED, "guard.audit_rate=1.0", "train.steps=40", kernels=kernels)

    assert owner.wait() == 0, owner.text
    assert [worker.wait() for worker in workers.values()] == [0, 0]
    summary = place.summary()
    assert (summary["status"], summary["evicted"], summary["verdicts"]) == ("completed", [], [])
    assert summary["guarantees"] == {"0": "own", "1": "bounded", "2": "bounded", "3": "own"}
    assert "from step 0 on: stage 0 own, stage 1 bounded, stage 2 bounded, stage 3 own" in owner.text
    # 40 steps, two stages, four microbatches, all of them
    assert summary["audits"] >= 320
    alone = place.finish("guard.classes='mixed'", "guard.mode='off'", "train.steps=40", run_dir="alone")
    assert summary["loss_last"] == pytest.approx(alone["loss_last"], rel=1e-3)
    # what was compared were distances: had bits been equal, this company would be of one class
    assert summary["final_weights_digest"] != alone["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoils", [(-1.0, 7), (1.0001, 3)], ids=["negated at the end", "a little larger in the middle"]
)
def test_wrong_weights_on_another_instruction_set_are_named_and_nobody_else_is(place, company, kernels, spoils):
    owner, workers = company(*MIXED, spoils=spoils, kernels=kernels)

    assert owner.wait() == 0, owner.text
    assert workers["south"].wait() == 0
    summary = place.summary()
    assert (summary["evicted"], summary["status"]) == (["north"], "completed")
    assert {verdict["party"] for verdict in summary["verdicts"]} == {"north"}
    assert summary["guarantees"] == {"0": "own", "1": "bounded", "2": "bounded", "3": "own"}
    honest = place.finish("guard.classes='mixed'", "guard.mode='off'", run_dir="honest")
    assert summary["loss_last"] == pytest.approx(honest["loss_last"], rel=1e-4)
    workers["north"].kill()
