"""Schedules of the exhaustive adversary, carried out by a real worker process with an ordinary certificate.

In one process `test_adversary_cases.py` plays the same schedules in turns, with every variant; here threads, links and
processes are real, and so is a death.
"""

import json
import sys
from pathlib import Path

import pytest
from real_runs import end_all, free_port, make_keys, make_place

from tiny_run_file import tiny_run_file

sys.path += [str(Path(__file__).parents[1] / "pipeline" / each) for each in ("", "adversary")]

from companies import COMPANIES
from test_adversary_cases import FOUND

INSIDER = str(Path(__file__).with_name("insider_worker.py"))
STEPS = 3
CASES = [
    name
    for name in FOUND
    if name.startswith(("1: ", "2: ", "2, variant: in lock-step", "3: ", "3, variant: two entries", "4: "))
]


def settings_of(company):
    """The run of a company; its guard is that of the schedule alone."""
    return (
        f"pipeline.stages={company.stages}",
        f"model.architecture.n_layer={company.stages}",
        *(f"guard.{key}={json.dumps(value)}" for key, value in company.guard.items()),
    )


def place_for(directory):
    """A place whose run file says nothing of a guard: what a schedule leaves out has its default."""
    place = make_place(directory)
    place.run_file.write_text(tiny_run_file(steps=STEPS, validate_every=0))
    return place


@pytest.fixture(scope="module")
def honest_digest(tmp_path_factory):
    """The digest of the weights of an honest and unguarded run, by the number of stages."""
    places, digests = [], {}

    def digest_of(company):
        stages = company.stages
        if stages not in digests:
            places.append(place_for(tmp_path_factory.mktemp(f"honest-{stages}")))
            settings = [word for word in settings_of(company) if not word.startswith("guard.")]
            digests[stages] = places[-1].finish(*settings, "guard.mode='off'")["final_weights_digest"]
        return digests[stages]

    yield digest_of
    for place in places:
        end_all(place)


def play(place, name):
    """Run a schedule to its end.

    Returns:
        The summary, and the processes of the workers by name.
    """
    schedule = FOUND[name]
    company = COMPANIES[schedule.company]
    keys, port = make_keys(place, "owner", *company.names), free_port()
    workers = {}
    for number, worker in enumerate(company.names, 1):
        file = place.path / f"{worker}.toml"
        file.write_text(f"identity = '{keys / worker}'\nowner = '127.0.0.1:{port}'\n")
        workers[worker] = (
            place.start_program(sys.executable, INSIDER, str(file), name)
            if number in schedule.acts
            else place.start_worker(file)
        )
    summary = place.finish(
        *settings_of(company),
        f"pipeline.remote_workers={list(company.names)}",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
        "pipeline.transport.keepalive_s=1.0",
    )
    return summary, workers


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_insider_has_no_honest_party_convicted_and_no_lie_in_the_weights(tmp_path, honest_digest, name):
    """Attacker: a worker with an ordinary certificate; where a schedule has a death, of an honest party."""
    schedule, place = FOUND[name], place_for(tmp_path)
    try:
        summary, workers = play(place, name)
        carried_out = {
            number: [f"act {n} is carried out" in workers[f"worker-{number}"].text for n in range(len(acts))]
            for number, acts in schedule.acts.items()
        }
        verify = place.start("audit", "verify", str(place.path / "run"))
        verified = verify.wait()
    finally:
        end_all(place)

    assert carried_out == {number: [True] * len(acts) for number, acts in schedule.acts.items()}
    assert summary["status"] == "completed"
    assert set(summary["evicted"]) <= schedule.liars
    assert set(summary["lost"]) <= schedule.liars | schedule.victims
    assert summary["final_weights_digest"] == honest_digest(COMPANIES[schedule.company])
    if name.startswith("3"):
        assert summary["evicted"] == sorted(schedule.liars)
    assert summary["steps_in_doubt"] == []
    assert verified == 0, verify.text
