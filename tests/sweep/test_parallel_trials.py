"""Trials side by side: all are tried, within the memory and the steps, and none is lost when something dies."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
from fake_trials import FakeTrials, write_files
from rich.console import Console

from phalanx.errors import ConfigError, PeerLostError
from phalanx.sweep import ProcessTrials, Sweep, load_sweep
from phalanx.sweep import processes as processes_module
from phalanx.sweep.journal import JOURNAL

PATIENCE_S = 300


class MeetingTrials(FakeTrials):
    """Each trial of the search waits until another one is under way."""

    def __init__(self, size, **options):
        super().__init__(**options)
        self.barrier = threading.Barrier(size)
        self.dead = set()

    def train_trial(self, run, directory, on_validation):
        if "seed" not in directory.name and not (self.dead and int(directory.name) >= self.barrier.parties):
            self.barrier.wait(PATIENCE_S)
        if directory.name in self.dead:
            raise PeerLostError("killed") from EOFError("signal 9")
        return super().train_trial(run, directory, on_validation)


def search(home, trials, *, resume=False, **changes):
    sweep = load_sweep(home / "sweep.toml", [f"{key}={value}" for key, value in changes.items()])
    return Sweep(sweep, home / "found", trials, lambda _line: None).run_search(resume=resume)


def rows_of(home):
    return [json.loads(line) for line in (home / "found" / JOURNAL).read_text().splitlines()]


def test_as_many_trials_as_the_file_says_are_under_way_and_each_is_trained_once(tmp_path):
    write_files(tmp_path, 'sampler = "random"', "trials = 6", "jobs = 3")

    result = search(tmp_path, trials := MeetingTrials(3))

    assert [trial.state for trial in result.trials] == ["completed"] * 6
    assert Counter(trials.calls).most_common(1)[0][1] == 1
    assert sorted(name for name in trials.calls if "seed" not in name) == [f"{number:04d}" for number in range(6)]
    assert result.winner is not None
    assert len({json.dumps(trial.values) for trial in result.trials}) == 6


def test_values_follow_from_the_seed_where_no_result_is_learned_from(tmp_path):
    found = {}
    for jobs in (1, 3):
        home = tmp_path / str(jobs)
        home.mkdir()
        write_files(home, 'sampler = "random"', "trials = 6", f"jobs = {jobs}")
        found[jobs] = search(home, FakeTrials())

    assert [trial.values for trial in found[1].trials] == [trial.values for trial in found[3].trials]
    assert found[1].winner == found[3].winner


def test_a_killed_trial_ends_the_search_and_is_gone_on_with(tmp_path):
    write_files(tmp_path, 'sampler = "random"', "trials = 4", "jobs = 2")
    trials = MeetingTrials(2)
    trials.dead = {"0001"}

    with pytest.raises(PeerLostError):
        search(tmp_path, trials)

    assert "ended" in trials.calls
    assert not [row for row in rows_of(tmp_path) if row["kind"] == "ended" and row["number"] == 1]
    result = search(tmp_path, FakeTrials(), resume=True, jobs=1)
    assert [trial.state for trial in result.trials] == ["completed"] * 4
    assert [row["number"] for row in rows_of(tmp_path) if row["kind"] == "begun"] == [0, 1, 2, 3]


def test_trials_under_way_count_for_the_limit_of_steps(tmp_path):
    # two that train the best again have four runs of nine steps
    write_files(tmp_path, 'sampler = "random"', "trials = 50", "max_steps = 72", "jobs = 4")

    result = search(tmp_path, FakeTrials())

    assert result.num_steps <= 72
    assert len(result.trials) == 4


def test_own_code_stays_in_one_process(tmp_path):
    path = write_files(tmp_path, "jobs = 2")
    run = (tmp_path / "run.toml").read_text().replace("[train]", '[train]\nobjective = { kind = "own:Loss" }')
    (tmp_path / "own.py").write_text("class Loss: ...\n")
    (tmp_path / "run.toml").write_text(run)

    with pytest.raises(ConfigError):
        load_sweep(path)


class FakeChild:
    """A process that trains until it is asked to end; two of them never are there together."""

    alive, most = 0, 0
    lock = threading.Lock()

    def __init__(self, _command, log):
        with self.lock:
            FakeChild.alive += 1
            FakeChild.most = max(FakeChild.most, FakeChild.alive)
        self.answers = [{"steps": 3, "own": 20.0, "named": {}}, {"status": "completed"}]

    def ask(self, _order, _content=b""):
        return self.answers.pop(0), b""

    def close(self):
        with self.lock:
            FakeChild.alive -= 1


@pytest.mark.parametrize(("room", "most"), [(100, 2), (60, 1), (10, 1)])
def test_trials_wait_for_memory(tmp_path, monkeypatch, room, most):
    """Of 40 MiB each; one that alone is over the limit is refused before (`find_excess`), and never waits for ever."""
    monkeypatch.setattr(processes_module, "planned_bytes", lambda _run: 40 << 20)
    monkeypatch.setattr(processes_module, "AskedProcess", FakeChild)
    monkeypatch.setattr(FakeChild, "most", 0)
    trials = ProcessTrials(lambda _directory: contextlib.nullcontext(Console(file=io.StringIO())), room)
    run = load_sweep(write_files(tmp_path)).make_run({})
    meeting, told = threading.Barrier(most), []

    def note(steps, _result):
        meeting.wait(PATIENCE_S)
        told.append(steps)

    threads = [
        threading.Thread(target=trials.train_trial, args=(run, tmp_path / "found" / f"{number}", note))
        for number in range(2 * most)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert told == [3] * 2 * most
    assert (FakeChild.most, FakeChild.alive) == (most, 0)


_SEARCH = """
import contextlib, io, os, signal, sys
from pathlib import Path
from rich.console import Console
from phalanx.sweep import ProcessTrials, Sweep, load_sweep


class Mortal(ProcessTrials):
    def train_trial(self, run, directory, on_validation):
        def die(steps, result):
            on_validation(steps, result)
            if directory.name == sys.argv[2] and steps == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        return super().train_trial(run, directory, die)


trials = Mortal(lambda directory: contextlib.nullcontext(Console(file=io.StringIO())))
Sweep(load_sweep(Path("sweep.toml")), Path("found"), trials, print).run_search(resume=sys.argv[1] == "resume")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_search_of_processes_that_is_killed_loses_no_trial(tmp_path):
    write_files(tmp_path, "trials = 3", 'sampler = "random"', "jobs = 2")

    def call(mode, victim):
        return subprocess.run(
            [sys.executable, "-c", _SEARCH, mode, victim],
            cwd=tmp_path,
            env={**os.environ, "PHALANX_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )

    killed, ended = call("begin", "0001"), call("resume", "none")

    assert killed.returncode == -signal.SIGKILL
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads((tmp_path / "found" / "sweep.json").read_text())
    assert [trial["state"] for trial in result["trials"]] == ["completed"] * 3
    assert [row["number"] for row in rows_of(tmp_path) if row["kind"] == "begun"] == [0, 1, 2]
    assert {number: len(trial["again"]) for number, trial in enumerate(result["trials"]) if trial["again"]}
