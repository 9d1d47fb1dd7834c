"""Machines of a torchrun that come and go: 2, then 3, then 2 ranks, and one curve."""

import os
import signal

import pytest
from domain_lab import ALONE, check_continued, finish, launch_domain, losses, rank_pid, train_domain, wait_until
from real_runs import end_all, events, free_port, make_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# long enough for a machine to come, and for another one to be missed; at a rate at which the last bits, which three
# copies round otherwise than two, do not grow: at 1e-2 a difference of 1e-7 is one of 1e-4 after 40 steps
LONG = ("--set", "checkpoint.every=50", "--set", "train.steps=1500", "--set", "train.validate_every=1500")
LONG += ("--set", "optimizer.lr=1e-4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    finish(train_domain(place, *ALONE, *LONG))
    yield losses(place)
    end_all(place)


def worlds(place):
    return [body["world"] for _, body in events(place, "run_started", "run_resumed")]


def has_world(place, *expected):
    try:
        return worlds(place) == list(expected)
    except (OSError, ValueError):
        return False


def has_saved(place, least):
    return any(int(path.name[5:]) >= least for path in (place.path / "run" / "checkpoints").glob("step-*"))


def test_two_then_three_then_two_machines_give_one_curve(place, undisturbed):
    meet = ("--nnodes", "2:3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "5", "--resume")
    agents = [launch_domain(place, *meet, *LONG) for _ in range(2)]
    wait_until(agents[0], lambda: has_world(place, 2) and has_saved(place, 50))

    agents.append(launch_domain(place, *meet, *LONG))
    wait_until(agents[0], lambda: has_world(place, 2, 3))
    seen = max((int(path.name[5:]) for path in (place.path / "run" / "checkpoints").glob("step-*")), default=0)
    wait_until(agents[0], lambda: has_saved(place, seen + 50))
    # a machine that is lost takes torchrun and its rank along; rank 0 keeps the store, so another one goes
    victim = next(agent for agent in reversed(agents) if not plays_rank_0(agent))
    victim.kill()
    left = [agent for agent in agents if agent is not victim]
    for agent in left:
        finish(agent)

    assert worlds(place)[0] == 2
    assert 3 in worlds(place)
    assert worlds(place)[-1] == 2
    check_continued(place, undisturbed, exact=False)


def plays_rank_0(agent):
    try:
        os.kill(rank_pid(agent, 0), signal.SIG_DFL)
    except AssertionError:
        return False
    return True
