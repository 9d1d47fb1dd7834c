"""A worker that is to be killed at a point of its work dies there, records where before it does, and nowhere else."""

import json
import threading

import pytest

from phalanx.lab.bench.chaos.dying_worker import KillSwitch
from phalanx.lab.bench.chaos.kill_plan import POINTS, PlannedKill


class Death:
    """Notes that the process died, and whether it was at work then."""

    def __init__(self, path, kill):
        self.path = path
        self.happened = threading.Event()
        self.executioner = KillSwitch(kill, path, self.happened.set)

    @property
    def record(self):
        return json.loads(self.path.read_text())


@pytest.fixture
def death_by(tmp_path):
    def make(point, *, step=3, microbatch=None, moment=0.0):
        kill = PlannedKill(worker="worker-1", step=step, point=point, microbatch=microbatch, moment=moment)
        return Death(tmp_path / "deaths.jsonl", kill)

    return make


@pytest.mark.parametrize("point", POINTS)
def test_the_time_comes_while_the_work_goes_on(death_by, point):
    death = death_by(point)

    death.executioner.begin_work(point, 3)

    assert death.happened.wait(120.0)
    assert (death.record["worker"], death.record["point"], death.record["step"]) == ("worker-1", point, 3)


def test_work_that_ends_before_the_time_comes_ends_with_the_worker(death_by):
    death = death_by("forward", moment=0.999)
    long_ago = threading.Event()
    death.executioner._usual["forward"] = 3600.0

    with death.executioner.working_at("forward", 3, 0):
        long_ago.set()

    assert death.happened.is_set()
    assert death.record["point"] == "forward"


def test_nobody_dies_before_its_step_or_at_another_point_or_microbatch(death_by):
    death = death_by("backward", step=3, microbatch=2)

    for step in range(3):
        with death.executioner.working_at("backward", step, 2):
            pass
    for microbatch in (0, 1, 3):
        with death.executioner.working_at("backward", 3, microbatch):
            pass
    with death.executioner.working_at("forward", 3, 2):
        pass
    assert not death.happened.is_set()

    with death.executioner.working_at("backward", 4, 2):
        pass
    assert death.happened.is_set()


def test_a_commitment_has_arrived_before_its_author_dies(death_by):
    death, arrived = death_by("commit"), threading.Event()

    death.executioner.begin_work("commit", 3, first=arrived.wait)
    assert not death.happened.wait(0.1)
    arrived.set()

    assert death.happened.wait(120.0)


def test_one_dies_once(death_by):
    death = death_by("forward")
    with death.executioner.working_at("forward", 3, 0):
        pass
    death.happened.clear()

    with death.executioner.working_at("forward", 4, 0):
        pass

    assert not death.happened.is_set()
    assert len(death.path.read_text().splitlines()) == 1


def test_who_has_no_plan_lives(tmp_path):
    death = Death(tmp_path / "deaths.jsonl", None)

    for point in POINTS:
        with death.executioner.working_at(point, 9, 0):
            pass

    assert not death.happened.is_set()
    assert not death.path.exists()
