"""`phalanx launch` on Ray: the bits of a local run; a dead worker's actor starts again, under another name."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
from real_runs import descendant, events, exists, make_keys

from machine_patience import patience_s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
]
LONG = ("train.steps=80", "train.validate_every=500", "checkpoint.every=80", "pipeline.respawns=1")
NAMES = ("owner", "worker-1", "worker-2", "worker-3")


def launched(place, keys, *overrides, options=()):
    settings = [word for override in (f"pipeline.pki='{keys}'", *overrides) for word in ("--set", override)]
    where = ("--run-dir", str(place.path / "run"))
    return place.start("launch", str(place.run_file), "--engine", "ray", *where, *settings, *options)


CLUSTER = """
import sys
from pathlib import Path
from phalanx.launch import Launch
from phalanx.launch.on_ray import open_cluster
with open_cluster(Launch(Path(sys.argv[1]), ("pipeline.pki=keys",)), None) as ray:
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
STRANGER = "import ray, sys; ray.init(address=sys.argv[1]); print('is in')"


def test_nobody_else_may_tell_a_launchs_own_cluster_what_to_run(place):
    own = [sys.executable, "-c", CLUSTER, str(place.run_file)]
    with subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as inside:
        address = inside.stdout.readline().strip()
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, address],
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
            capture_output=True,
            text=True,
            timeout=patience_s(120.0),
            check=False,
        )
        inside.stdin.close()
        assert inside.wait(patience_s(60.0)) == 0

    assert address
    assert stranger.returncode != 0
    assert "is in" not in stranger.stdout


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_a_launch_on_ray_has_the_bits_of_a_local_run(place, clean):
    process = launched(place, make_keys(place, *NAMES[:3]))

    assert process.wait() == 0, process.text

    summary = place.summary()
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert summary["audits"] == clean["audits"]
    assert [kind for kind, _ in events(place, "run_started", "run_resumed", "lost")] == ["run_started"]


@pytest.mark.parametrize("who", ["worker", "actor"])
def test_a_dead_worker_restarts_nothing_but_itself_under_another_name(place, who):
    clean = place.finish(*LONG, "guard.mode='off'", run_dir="clean")
    process = launched(place, make_keys(place, *NAMES), *LONG)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    owner = descendant(process, "phalanx train")
    worker = descendant(process, "phalanx worker", "/worker-1.toml")

    os.kill(worker if who == "worker" else parent_of(worker), signal.SIGKILL)
    place.wait_for(process, lambda: place.has_line("events.jsonl", '"worker-3"', after='"lost"'))
    assert not exists(worker)
    assert exists(owner)
    assert process.wait() == 0, process.text

    found = events(place, "run_started", "run_resumed", "lost", "party_joined", "evicted")
    assert [kind for kind, _ in found] == ["run_started", "party_joined", "party_joined", "lost", "party_joined"]
    assert (found[3][1]["party"], found[4][1]["party"]) == ("worker-1", "worker-3")
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]


def test_an_owner_that_is_killed_goes_on_and_its_workers_come_back(place, clean):
    process = launched(place, make_keys(place, *NAMES[:3]))
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))

    os.kill(descendant(process, "phalanx train"), signal.SIGKILL)
    assert process.wait() == 0, process.text

    assert place.summary()["resumed_from"] == 3
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]


MACHINES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(nodes[0], allow_graceful=False)
print("gone", flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@pytest.mark.timeout(600)
def test_when_a_machine_of_the_cluster_dies_its_worker_comes_back_on_another_one(place):
    # Ray needs some seconds to miss a machine
    longer = (*LONG, "train.steps=500", "checkpoint.every=500")
    clean = place.finish(*longer, "guard.mode='off'", run_dir="clean")
    keys = make_keys(place, *NAMES)
    with subprocess.Popen(
        [sys.executable, "-c", MACHINES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    ) as machines:
        address = machines.stdout.readline().strip()
        bind = "pipeline.transport.bind='0.0.0.0'"
        process = launched(place, keys, *longer, bind, options=("--address", address))
        place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))

        print("now", file=machines.stdin, flush=True)
        assert machines.stdout.readline().strip() == "gone"
        place.wait_for(process, lambda: place.has_line("events.jsonl", '"worker-3"', after='"lost"'))
        assert process.wait() == 0, process.text
        print("end", file=machines.stdin, flush=True)

    found = events(place, "run_started", "run_resumed", "lost", "party_joined", "evicted")
    assert [kind for kind, _ in found] == ["run_started", "party_joined", "party_joined", "lost", "party_joined"]
    assert found[4][1]["party"] == "worker-3"
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]
