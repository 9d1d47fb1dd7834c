"""Engines: whatever performs the pieces, results come in the order of the tasks and errors arrive as they were."""

import json
import os
import signal
import threading

import pytest
from build_recipes import read_recipe

from phalanx.child import PythonProcess
from phalanx.data.build import local
from phalanx.data.build.local import LocalProcesses, OneProcess, answer_task, error_from_json, open_local
from phalanx.data.build.work import BuildWorker
from phalanx.errors import ConfigError, DataError, DiskError
from phalanx.launch.data_on_ray import RayTasks, perform_task

TASKS = [{"act": "number", "number": number} for number in range(20)]


@pytest.fixture
def worker(tmp_path):
    """A worker that nothing was asked of yet."""
    (tmp_path / "work").mkdir()
    return BuildWorker(read_recipe(tmp_path), tmp_path / "work", tmp_path)


class SlowFirst:
    """Stands in for a process: of two neighbours the later one is answered first."""

    answered: dict[int, threading.Event]

    def __init__(self, job):
        self.job = job

    def request_task(self, task):
        number = task["number"]
        if number % 2 == 0:
            assert self.answered[number + 1].wait(60)
        self.answered[number].set()
        return {"number": number}

    def kill_process(self):
        pass


def test_results_come_in_the_order_of_the_tasks(worker, monkeypatch):
    SlowFirst.answered = {task["number"]: threading.Event() for task in TASKS}
    monkeypatch.setattr(local, "_WorkerProcess", SlowFirst)

    with LocalProcesses(worker, 2) as engine:
        assert [one["number"] for one in engine.perform_tasks(iter(TASKS))] == list(range(20))


def test_tasks_are_taken_no_further_ahead_than_processes_need(worker, monkeypatch):
    SlowFirst.answered = {number: threading.Event() for number in range(1001)}
    monkeypatch.setattr(local, "_WorkerProcess", SlowFirst)
    taken = []

    def tasks():
        for number in range(1000):
            taken.append(number)
            yield {"number": number}

    with LocalProcesses(worker, 2) as engine:
        next(engine.perform_tasks(tasks()))
        assert len(taken) <= 8


def test_processes_that_cannot_be_started_leave_their_places_to_later_tasks(worker, monkeypatch):
    def refuse_to_start(job):
        raise DiskError("cannot start a process")

    monkeypatch.setattr(local, "_WorkerProcess", refuse_to_start)
    engine = LocalProcesses(worker, 2)

    failures = [engine._threads.submit(engine._delegate_task, task) for task in TASKS]

    assert [type(failure.exception(60)) for failure in failures] == [DiskError] * len(TASKS)
    engine.close()


def test_one_worker_is_this_process(worker):
    assert isinstance(open_local(worker, 1), OneProcess)
    assert isinstance(open_local(worker, 3), LocalProcesses)


@pytest.mark.parametrize("kind", [DataError, DiskError, ConfigError])
def test_an_error_of_another_process_arrives_as_it_was(worker, monkeypatch, kind):
    def fail(task):
        raise kind("texts/a.jsonl, line 3: is not JSON").with_facts(code="PHX-I013", file="texts/a.jsonl")

    monkeypatch.setattr(worker, "perform_task", fail)

    found = error_from_json(json.loads(json.dumps(answer_task(worker, {})))["error"])

    assert type(found) is kind
    assert str(found) == "texts/a.jsonl, line 3: is not JSON"
    assert found.error_facts == {"code": "PHX-I013", "file": "texts/a.jsonl"}


def test_a_machine_with_other_versions_is_refused(worker):
    job = worker.to_job()
    job["versions"] = {**job["versions"], "numpy": "0.1"}

    with pytest.raises(DataError, match=r"a worker has versions that differ from the build: \{'numpy'"):
        BuildWorker.from_job(job)


class LostError(Exception):
    """Stands for an error of Ray's own."""


class Ray:
    """Stands in for the module: a task is performed when its result is asked for."""

    class exceptions:  # noqa: N801 - as Ray names it
        RayError = LostError

    def __init__(self, loses=()):
        self.loses, self.waiting = loses, 0

    def remote(self, **options):
        assert options == {"num_cpus": 1, "max_retries": 3}
        return lambda call: Remote(self, call)

    def cluster_resources(self):
        return {"CPU": 2.0}

    def get(self, found):
        self.waiting -= 1
        if found[1] in self.loses:
            raise LostError("the machine is gone")
        return found[0](*found[1:])


class Remote:
    def __init__(self, ray, call):
        self.ray, self.call = ray, call

    def remote(self, job, task):
        self.ray.waiting += 1
        assert self.ray.waiting <= 8
        return lambda _: self.call(job, task), task


def on_ray(worker, ray):
    """Return the tasks of a cluster that is there already."""
    engine = RayTasks(worker)
    engine._ray = ray
    return engine


def test_tasks_on_ray_are_the_same_as_here(worker):
    pieces = [{"act": "sift", "pass": 0, "piece": piece.to_json()} for piece in pieces_of(worker)]

    there = list(on_ray(worker, Ray()).perform_tasks(iter(pieces)))

    assert there == list(OneProcess(worker).perform_tasks(pieces))
    assert [one["documents"] for one in there] == [42, 1]


def pieces_of(worker):
    from phalanx.data.build.pieces import list_pieces

    return list_pieces(worker.recipe, worker.open_recipe_source)


def test_a_task_that_ray_lost_for_good_ends_the_build_with_what_to_do(worker):
    task = {"act": "sift"}

    with pytest.raises(
        DataError, match=r"a task failed \(the machine is gone\); repeat the command to continue the build"
    ):
        list(on_ray(worker, Ray(loses=[json.dumps(task)])).perform_tasks([task]))


def test_an_error_on_ray_is_the_error_here(worker, monkeypatch):
    # a process of Ray changes its directory; monkeypatch goes back
    monkeypatch.chdir(".")
    job = {**worker.to_job(), "code": "another", "directory": str(worker.home)}

    found = json.loads(perform_task(json.dumps(job), json.dumps({})))

    assert "versions that differ" in found["error"]["message"]


@pytest.mark.slow
def test_a_process_that_is_killed_is_told_by_signal_and_piece(worker, monkeypatch):
    started = []
    start = PythonProcess.__init__

    def noted(self, *words, **options):
        started.append(self)
        start(self, *words, **options)

    monkeypatch.setattr(PythonProcess, "__init__", noted)
    task = {"act": "sift", "pass": 0, "piece": pieces_of(worker)[0].to_json()}

    with LocalProcesses(worker, 2) as engine:
        assert next(engine.perform_tasks([task]))["documents"] == 42
        os.kill(started[0].pid, signal.SIGKILL)
        started[0].wait(60)
        with pytest.raises(
            DataError, match=r"ended \(signal 9.*\) at sift of 'note.txt'; repeat the command to continue the build"
        ):
            list(engine.perform_tasks([task]))

    assert all(process.poll() is not None for process in started)
