"""Six real processes on machines that are taken in groups, as a drawn spot trace says; then layers are cut anew."""

import json
import os
import random
import signal

import pytest
from real_runs import JOURNAL, events, local_workers

from phalanx.lab.bench.chaos.spot_traces import SPOT_SHAPES, draw_trace

SEVEN = ("pipeline.stages=7", "model.architecture.n_layer=7", "train.steps=60", "train.validate_every=60")
SPOT = ("guard.shadows=2", "pipeline.respawns=20", "checkpoint.every=10", JOURNAL)
NUM_GROUPS = 3
SEED = 1


def num_events(place):
    """How many parties were lost, and how many joined later than the first step."""
    joined = [body for _, body in events(place, "party_joined") if "step" in body]
    return len(events(place, "lost")), len(joined)


@pytest.mark.slow
def test_a_spot_trace_costs_no_step_and_no_bit_and_stages_are_cut_anew(place):
    clean = place.finish(*SEVEN, "guard.mode='off'", run_dir="clean")
    trace = draw_trace(SPOT_SHAPES["oobleck-p3"], 5, 24.0, seed=SEED)
    groups = [len(event.machines) for event in trace if event.kind == "taken" and len(event.machines) <= 2]
    draw, num_killed = random.Random(SEED), 0

    owner = place.train(*SEVEN, *SPOT)
    for number, size in enumerate(groups[:NUM_GROUPS]):
        place.wait_for(owner, lambda step=4 + 8 * number: place.has_line("metrics.jsonl", f'"step": {step},'))
        workers = local_workers(owner)
        for name in draw.sample(sorted(workers), size):
            os.kill(workers[name], signal.SIGKILL)
        num_killed += size
        place.wait_for(owner, lambda gone=num_killed: num_events(place) == (gone, gone))
    owner.popen.send_signal(signal.SIGINT)
    owner.wait()
    summary = place.finish(*SEVEN, *SPOT, "pipeline.stages=5", resume=True)

    assert 2 in groups[:NUM_GROUPS]
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (summary["verdicts"], summary["steps_lost"]) == ([], 0)
    lines = (place.path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step") for line in lines if '"batch"' in line]
    assert steps == list(range(60))


@pytest.mark.slow
def test_a_run_cuts_its_layers_by_itself_when_machines_are_gone_for_good(place):
    steps = (*SEVEN, "train.steps=80", "train.validate_every=5")
    clean = place.finish(*steps, "guard.mode='off'", run_dir="clean")

    owner = place.train(*steps, JOURNAL, options=("--recut",))
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    workers = local_workers(owner)
    for name in ("worker-2", "worker-5"):
        os.kill(workers[name], signal.SIGKILL)
        place.wait_for(owner, lambda gone=name: gone in [body["party"] for _, body in events(place, "lost")])
    assert owner.wait() == 0, owner.text

    ((_, changed),) = events(place, "config_changed")
    assert changed["keys"]["pipeline.stages"] == [7, 5]
    assert "3 workers for 5 stages since step " in owner.text
    summary = place.summary()
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert (summary["status"], summary["verdicts"], summary["steps_lost"]) == ("completed", [], 0)
