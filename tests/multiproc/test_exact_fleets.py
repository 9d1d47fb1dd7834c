"""With exact numerics parties of three instruction sets are one fleet: equal bits, no tolerance, liars named."""

import sys
from pathlib import Path

import pytest
from real_runs import free_port, make_keys, worker_program

LIAR = str(Path(__file__).with_name("claiming_worker.py"))
EXACT = ("train.numerics='exact'", "guard.step_audit_rate=0.25", "guard.owner_audit_rate=0.25")
KERNELS = {
    "north": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "south": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}


@pytest.fixture
def fleet(place):
    """Starts an owner, and a worker on each of two older processors; the first one lies as `spoils` says."""

    def start(*settings, spoils=None, attack=None):
        port, keys = free_port(), make_keys(place, "owner", *KERNELS)
        workers = {}
        for name, variables in KERNELS.items():
            file = place.path / f"{name}.toml"
            file.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n")
            program = worker_program(file, attack if name == "north" else None)
            if spoils is not None and name == "north":
                program = (LIAR, str(file), *map(str, spoils))
            given = (f"{variable}={value}" for variable, value in variables.items())
            workers[name] = place.start_program("env", *given, sys.executable, *program)
        owner = place.train(
            f"pipeline.remote_workers={list(KERNELS)}",
            f"pipeline.pki='{keys}'",
            f"pipeline.transport.port={port}",
            *EXACT,
            *settings,
        )
        return owner, workers

    return start


@pytest.mark.slow
def test_three_instruction_sets_train_as_one_class_does(place, fleet):
    owner, workers = fleet("train.steps=60", "guard.audit_rate=1.0")

    assert owner.wait() == 0, owner.text
    assert [worker.wait() for worker in workers.values()] == [0, 0]
    summary = place.summary()
    assert (summary["status"], summary["evicted"], summary["verdicts"]) == ("completed", [], [])
    assert summary["guarantees"] == {"0": "own", "1": "bit-equal", "2": "bit-equal", "3": "own"}
    alone = place.finish(*EXACT, "guard.mode='off'", "train.steps=60", run_dir="alone")
    assert summary["final_weights_digest"] == alone["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize("spoils", [(-1.0, 7), (1.0001, 3)], ids=["negated at the end", "a little larger"])
def test_a_liar_on_another_processor_is_named_and_its_lie_undone(place, fleet, spoils):
    owner, workers = fleet(spoils=spoils)

    assert owner.wait() == 0, owner.text
    summary = place.summary()
    assert (summary["evicted"], summary["status"]) == (["north"], "completed")
    assert {verdict["party"] for verdict in summary["verdicts"]} == {"north"}
    honest = place.finish(*EXACT, "guard.mode='off'", run_dir="honest")
    assert summary["final_weights_digest"] == honest["final_weights_digest"]
    workers["north"].kill()


@pytest.mark.slow
def test_evidence_of_a_lie_is_redone_alike_on_other_processors(place, fleet):
    owner, workers = fleet(attack="kind = 'scale'\nstrength = 1.001\nrate = 1.0\nfrom_step = 2\n")
    assert owner.wait() == 0, owner.text
    assert place.summary()["evicted"] == ["north"]
    workers["north"].kill()
    evidence = sorted((place.path / "run" / "evidence").glob("*.json"))

    texts = {explain_elsewhere(place, file, kernels) for file in evidence for kernels in ({}, *KERNELS.values())}

    assert evidence
    assert len(texts) == len(evidence)
    assert all("north" in text and "holds" in text for text in texts)


def explain_elsewhere(place, file, kernels):
    """What `phalanx audit explain` prints in a process of another instruction set, with exit code 0."""
    given = (f"{variable}={value}" for variable, value in kernels.items())
    command = (sys.executable, "-m", "phalanx", "audit", "explain", str(file))
    process = place.start_program("env", *given, *command, "--authority", str(place.path / "keys" / "authority.pem"))
    assert process.wait() == 0, process.text
    return process.text
