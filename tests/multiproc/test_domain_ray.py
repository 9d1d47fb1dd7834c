"""Ranks in Ray actors: one that dies or hangs has all of them placed and started again; machines come and go."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
from domain_lab import (
    ALONE,
    check_continued,
    finish,
    launch_domain,
    losses,
    rank_pid,
    seconds_until_gone,
    train_domain,
    wait_for_step,
    wait_until,
)
from real_runs import end_all, events, exists, make_place

from machine_patience import patience_s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
]
# long enough for a machine to come, and for another one to be missed
LONG = ("--set", "checkpoint.every=50", "--set", "train.steps=1500", "--set", "train.validate_every=1500")
STARTS = ("run_started", "run_resumed", "run_completed")


def curve(place, *options, run_dir="run"):
    finish(train_domain(place, *ALONE, *options, run_dir=run_dir))
    return losses(place, run_dir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    yield curve(place)
    end_all(place)


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "actor"])
def test_a_killed_rank_on_ray_comes_back_by_itself(place, undisturbed, who):
    process = launch_domain(place, "--engine", "ray")
    wait_for_step(place, process, 7)
    pid = rank_pid(process, 0 if who == "rank 0" else 1)

    os.kill(parent_of(pid) if who == "actor" else pid, signal.SIGKILL)
    finish(process)

    check_continued(place, undisturbed)
    assert [kind for kind, _ in events(place, *STARTS)] == list(STARTS)
    assert not exists(pid)


def test_a_rank_on_ray_that_hangs_is_started_again(place, undisturbed):
    process = launch_domain(place, "--engine", "ray")
    wait_for_step(place, process, 7)
    pid = rank_pid(process, 1)

    os.kill(pid, signal.SIGSTOP)
    seconds = seconds_until_gone(process, pid)
    finish(process)

    check_continued(place, undisturbed)
    assert seconds < patience_s(60.0)


MACHINES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1)]
print(cluster.address, flush=True)
sys.stdin.readline()
nodes.append(cluster.add_node(num_cpus=1))
print("come", flush=True)
sys.stdin.readline()
cluster.remove_node(nodes.pop(), allow_graceful=False)
print("gone", flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


def worlds(place):
    return [body["world"] for _, body in events(place, "run_started", "run_resumed")]


def test_machines_of_a_cluster_that_come_and_go_give_one_curve(place):
    expected = curve(place, *LONG, run_dir="undisturbed")
    with subprocess.Popen(
        [sys.executable, "-c", MACHINES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    ) as machines:

        def tell(word, answer):
            print(word, file=machines.stdin, flush=True)
            assert machines.stdout.readline().strip() == answer

        address = machines.stdout.readline().strip()
        process = launch_domain(place, "--engine", "ray", "--address", address, *LONG)
        wait_for_step(place, process, 2)
        assert worlds(place) == [2]
        tell("another", "come")
        wait_until(process, lambda: worlds(place)[-1] == 3)
        tell("away", "gone")
        finish(process)
        print("end", file=machines.stdin, flush=True)

    assert worlds(place) == [2, 3, 2]
    check_continued(place, expected, exact=False)
