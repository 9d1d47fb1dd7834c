import threading

import pytest

from phalanx.telemetry import PhaseTimer


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def pass_s(self, seconds):
        self.now_s += seconds


@pytest.fixture
def wall():
    return FakeClock()


@pytest.fixture
def cpu():
    return FakeClock()


@pytest.fixture
def timer(wall, cpu):
    return PhaseTimer(cpu_clock=cpu, wall_clock=wall)


def test_a_phase_that_runs_twice_is_added_up(timer, wall, cpu):
    for _ in range(2):
        with timer.time_phase("forward"):
            wall.pass_s(3.0)
            cpu.pass_s(2.0)

    assert timer.take_wall() == {"forward": 6.0}
    assert timer.take_cpu() == {"forward": 4.0}


def test_taking_starts_anew(timer, wall):
    with timer.time_phase("forward"):
        wall.pass_s(1.0)
    timer.take_wall()

    assert timer.take_wall() == {}


def test_an_inner_phase_is_not_counted_twice(timer, wall):
    with timer.time_phase("step"):
        wall.pass_s(1.0)
        with timer.time_phase("hash"):
            wall.pass_s(4.0)

    assert timer.take_wall() == {"hash": 4.0, "step": 1.0}


def test_a_phase_that_fails_is_still_timed(timer, wall):
    with pytest.raises(RuntimeError), timer.time_phase("forward"):
        wall.pass_s(2.0)
        raise RuntimeError

    with timer.time_phase("backward"):
        wall.pass_s(1.0)

    assert timer.take_wall() == {"forward": 2.0, "backward": 1.0}


def test_threads_do_not_nest_into_each_other():
    timer = PhaseTimer()
    inside, done = threading.Event(), threading.Event()

    def work():
        with timer.time_phase("thread"):
            inside.set()
            done.wait(120.0)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(120.0)
    with timer.time_phase("main"):
        pass
    done.set()
    thread.join()

    taken = timer.take_wall()
    assert set(taken) == {"thread", "main"}
    assert taken["main"] <= taken["thread"]


def test_real_clocks_give_seconds_that_are_not_negative():
    timer = PhaseTimer()

    with timer.time_phase("sum"):
        sum(range(1000))

    assert timer.take_wall()["sum"] > 0.0
    assert timer.take_cpu()["sum"] >= 0.0
