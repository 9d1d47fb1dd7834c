"""Workers that are forked from a process which has imported everything; real ones, and none outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from machine_patience import patience_s
from phalanx.pipeline import LocalWorkers, WorkerConfig
from phalanx.pipeline.processes.fork_server_client import start_fork_server

FORKED_WORKER = """
import os, sys, threading, time
from pathlib import Path
from phalanx.child import die_with_parent
from phalanx.pipeline.worker.process import requested_file

die_with_parent()
if os.environ.get("WITH_A_THREAD") and sys.argv[1] == "-":
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
file = requested_file(Path(sys.argv[1]))
if file is not None:
    print("says", file.read_text(), "in", os.getpgid(0) == os.getpid(), flush=True)
    if file.read_text() == "stay":
        time.sleep(3600)
    sys.exit(int(file.read_text()))
"""
OWNER_THAT_FORKS = """
import json, os, sys, threading
from pathlib import Path
from phalanx.pipeline import fork_here

home, known = Path(sys.argv[1]), "before"

def serve(file):
    print(known, file.read_text(), os.environ["OMP_NUM_THREADS"], os.getpgid(0) == os.getpid(), flush=True)
    if file.read_text() == "broken":
        raise RuntimeError("as a bug would")
    if file.read_text() == "stay":
        threading.Event().wait()
    return int(file.read_text())

server = fork_here(("no.such.module",), 3, serve)
known = "after"
workers = {}
for name in ("7", "broken", "stay"):
    (home / name).write_text(name)
    workers[name] = server.start_worker(name, home / name, home / f"{name}.log")
codes = {name: workers[name].wait(600.0) for name in ("7", "broken")}
thread = threading.Event()
threading.Thread(target=thread.wait, daemon=True).start()
refused = fork_here(("no.such.module",), 3, serve) is None
while not (home / "stay.log").exists():
    server.read_events(1.0)
print(json.dumps({"codes": codes, "refused": refused, "stays": workers["stay"].pid}), flush=True)
thread.wait()
"""
PATIENCE_S = 60.0


def wait_until(condition):
    deadline = time.monotonic() + patience_s(PATIENCE_S)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def open_fork_server(tmp_path_factory):
    """Start a fork server of these small workers; importing torch is what takes its time."""
    home, opened = tmp_path_factory.mktemp("fork_server"), []
    (home / "forked_worker.py").write_text(FORKED_WORKER)

    def open_one():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{home}:{os.environ.get('PYTHONPATH', '')}")
            modules = ["json", "there.is.no.such.module"]
            opened.append(start_fork_server(("forked_worker",), home / "fork_server.log", 1, modules))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def fork_server(open_fork_server):
    return open_fork_server()


@pytest.fixture
def start(tmp_path, request):
    def start(fork_server, name, content):
        (tmp_path / name).write_text(content)
        # a fork server knows a worker by its name
        return fork_server.start_worker(f"{name}-{request.node.name}", tmp_path / name, tmp_path / f"{name}.log")

    return start


def pid_of(fork_server):
    return fork_server._process.pid


def children_of(pid):
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def test_workers_serve_their_files_and_their_ends_are_heard(fork_server, start, tmp_path):
    first, second = start(fork_server, "worker-3", "0"), start(fork_server, "worker-4", "7")

    assert (first.wait(patience_s(PATIENCE_S)), second.wait(patience_s(PATIENCE_S))) == (0, 7)
    assert (tmp_path / "worker-3.log").read_text() == "says 0 in True\n"


def test_one_that_is_killed_is_gone_and_the_others_stay(fork_server, start):
    first, second = start(fork_server, "worker-3", "stay"), start(fork_server, "worker-4", "stay")
    wait_until(lambda: len(children_of(pid_of(fork_server))) == 2)

    first.kill()

    assert first.wait(patience_s(PATIENCE_S)) == -signal.SIGKILL
    assert second.poll() is None
    second.kill()
    assert second.wait(patience_s(PATIENCE_S)) == -signal.SIGKILL


def test_a_worker_that_is_not_there_any_more_cannot_be_killed_twice(fork_server, start):
    worker = start(fork_server, "worker-3", "0")
    worker.wait(patience_s(PATIENCE_S))

    worker.kill()

    assert worker.poll() == 0


@pytest.mark.slow
def test_nobody_outlives_the_fork_server(open_fork_server, start):
    fork_server = open_fork_server()
    worker = start(fork_server, "worker-3", "stay")
    wait_until(lambda: len(children_of(pid_of(fork_server))) == 1)
    (pid,) = children_of(pid_of(fork_server))

    os.kill(pid_of(fork_server), signal.SIGKILL)

    wait_until(lambda: not runs(pid))
    wait_until(lambda: worker.poll() is not None)
    assert not fork_server.is_open


def test_a_fork_server_that_is_closed_twice_closes_nothing_of_others(fork_server):
    fork_server.close()
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]

    fork_server.close()

    assert [os.fstat(handle).st_rdev != 0 for handle in taken] == [True] * 8
    for handle in taken:
        os.close(handle)


@pytest.mark.slow
def test_a_fork_server_that_has_threads_starts_workers_from_nothing(open_fork_server, start, tmp_path, monkeypatch):
    monkeypatch.setenv("WITH_A_THREAD", "1")

    worker = start(open_fork_server(), "worker-3", "5")

    assert worker.wait(patience_s(PATIENCE_S)) == 5
    assert (tmp_path / "worker-3.log").read_text() == "says 5 in True\n"


def test_a_process_forks_workers_with_what_it_has_imported_and_none_outlives_it(tmp_path):
    command = [sys.executable, "-c", OWNER_THAT_FORKS, str(tmp_path)]
    # a thread of numpy's own would be refused as any other
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone) as owner:
        told = json.loads(owner.stdout.readline())
        owner.kill()

    assert told["codes"] == {"7": 7, "broken": 1}
    assert told["refused"], "a process with a thread was forked"
    assert (tmp_path / "7.log").read_text() == "before 7 3 True\n"
    assert "RuntimeError: as a bug would" in (tmp_path / "broken.log").read_text()
    wait_until(lambda: not runs(told["stays"]))


def test_without_a_fork_server_workers_start_as_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.pipeline.processes.local_workers.can_fork", lambda: False)
    with LocalWorkers(tmp_path) as workers:
        workers.start_fork_server(1)

        assert workers._fork_server is None


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit(3)", "(no output, exit code 3)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "(no output, signal 9)"),
        ("print('first'); print('last')", "last"),
    ],
)
def test_a_worker_that_ended_is_described_by_its_last_line_or_its_end(tmp_path, monkeypatch, program, said):
    (tmp_path / "short_worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = WorkerConfig(identity="keys", owner="127.0.0.1:1", owner_name="owner")

    with LocalWorkers(tmp_path, ("short_worker",)) as workers:
        workers.start_workers({"worker-1": config})
        wait_until(lambda: not workers.is_worker_alive("worker-1"))

        assert workers.worker_output("worker-1") == said
