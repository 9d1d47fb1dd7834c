"""Workers that are forked from a process which has imported everything; real ones, and none outlives its parent."""

import os
import signal
import time
from pathlib import Path

import pytest

from phalanx.pipeline import LocalWorkers
from phalanx.pipeline.processes.fork_server_client import ForkServer

NURSLING = """
import os, sys, threading, time
from pathlib import Path
from phalanx.pipeline.worker.process import born_file, die_with_parent

die_with_parent()
if os.environ.get("WITH_A_THREAD") and sys.argv[1] == "-":
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
file = born_file(Path(sys.argv[1]))
if file is not None:
    print("says", file.read_text(), "in", os.getpgid(0) == os.getpid(), flush=True)
    if file.read_text() == "stay":
        time.sleep(3600)
    sys.exit(int(file.read_text()))
"""
PATIENCE_S = 60.0


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def open_nursery(tmp_path_factory):
    """Start a nursery of these small workers; importing torch is what takes its time."""
    home, opened = tmp_path_factory.mktemp("nursery"), []
    (home / "nursling.py").write_text(NURSLING)

    def open_one():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{home}:{os.environ.get('PYTHONPATH', '')}")
            opened.append(ForkServer(("nursling",), home / "nursery.log", 1, ["json", "there.is.no.such.module"]))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def nursery(open_nursery):
    return open_nursery()


@pytest.fixture
def start(tmp_path, request):
    def start(nursery, name, content):
        (tmp_path / name).write_text(content)
        # a nursery knows a worker by its name
        return nursery.start(f"{name}-{request.node.name}", tmp_path / name, tmp_path / f"{name}.log")

    return start


def pid_of(nursery):
    return nursery._process.pid


def children_of(pid):
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def test_workers_serve_their_files_and_their_ends_are_heard(nursery, start, tmp_path):
    first, second = start(nursery, "worker-3", "0"), start(nursery, "worker-4", "7")

    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 7)
    assert (tmp_path / "worker-3.log").read_text() == "says 0 in True\n"


def test_one_that_is_killed_is_gone_and_the_others_stay(nursery, start):
    first, second = start(nursery, "worker-3", "stay"), start(nursery, "worker-4", "stay")
    wait_until(lambda: len(children_of(pid_of(nursery))) == 2)

    first.kill()

    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    assert second.poll() is None
    second.kill()
    assert second.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_worker_that_is_not_there_any_more_cannot_be_killed_twice(nursery, start):
    worker = start(nursery, "worker-3", "0")
    worker.wait(PATIENCE_S)

    worker.kill()

    assert worker.poll() == 0


def test_nobody_outlives_the_nursery(open_nursery, start):
    nursery = open_nursery()
    worker = start(nursery, "worker-3", "stay")
    wait_until(lambda: len(children_of(pid_of(nursery))) == 1)
    (pid,) = children_of(pid_of(nursery))

    os.kill(pid_of(nursery), signal.SIGKILL)

    wait_until(lambda: not runs(pid))
    wait_until(lambda: worker.poll() is not None)
    assert not nursery.is_open


@pytest.mark.slow
def test_a_nursery_that_has_threads_starts_workers_from_nothing(open_nursery, start, tmp_path, monkeypatch):
    monkeypatch.setenv("WITH_A_THREAD", "1")

    worker = start(open_nursery(), "worker-3", "5")

    assert worker.wait(PATIENCE_S) == 5
    assert (tmp_path / "worker-3.log").read_text() == "says 5 in True\n"


def test_without_a_nursery_workers_start_as_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.pipeline.processes.local_workers.can_nurse", lambda: False)
    with LocalWorkers(tmp_path) as workers:
        workers.keep_nursery(1)

        assert workers._nursery is None
