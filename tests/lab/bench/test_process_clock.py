"""CPU time of other processes is read from outside."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from machine_patience import patience_s
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.process_clock import (
    cpu_seconds,
    peak_memory_bytes,
    physical_memory_bytes,
    process_tree,
    wait_until_quiet,
)

IDLE = "import sys; sys.stdin.read()"
BUSY = "while True: pass"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", request.param], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_own_work_is_counted() -> None:
    before, own = cpu_seconds([os.getpid()]), time.process_time()

    sum(range(2_000_000))

    assert cpu_seconds([os.getpid()]) - before == pytest.approx(time.process_time() - own, abs=0.05)


@pytest.mark.parametrize("child", [IDLE], indirect=True)
def test_a_child_is_found_and_falls_quiet(child: subprocess.Popen[bytes]) -> None:
    assert child.pid in process_tree(os.getpid())

    ended = wait_until_quiet([child.pid], timeout_s=patience_s(20.0))

    assert ended <= time.perf_counter()


STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {IDLE!r}])"


@pytest.mark.parametrize("child", [STARTS], indirect=True)
def test_what_a_child_has_started_belongs_to_the_tree(child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + patience_s(20.0)
    while len(process_tree(child.pid)) < 2:
        assert time.monotonic() < deadline

    assert set(process_tree(child.pid)) < set(process_tree(os.getpid()))


@pytest.mark.parametrize("child", [BUSY], indirect=True)
def test_a_process_that_never_rests_is_an_error(child: subprocess.Popen[bytes]) -> None:
    def refusal() -> str:
        try:
            wait_until_quiet([child.pid], timeout_s=0.5)
        except TrainingError as exc:
            return str(exc)
        return ""

    # on a full machine the child may get no processor for one look
    assert any("still busy" in refusal() for _ in range(40))


@pytest.mark.parametrize("child", [IDLE], indirect=True)
def test_a_process_that_has_ended_is_an_error(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()

    with pytest.raises(TrainingError, match="has ended"):
        cpu_seconds([child.pid])


def test_the_peak_of_memory_stays_when_it_is_given_back() -> None:
    before = peak_memory_bytes([os.getpid()])
    block = bytearray(os.urandom(1)) * (before + 2**24)
    size = len(block)
    del block

    assert peak_memory_bytes([os.getpid()]) >= size
    assert peak_memory_bytes([os.getpid(), os.getpid()]) >= 2 * size


SHARING = """
import mmap, os, sys
room = mmap.mmap(-1, 64 << 20)
room.write(b"x" * (64 << 20))
child = os.fork()
if not child:
    room.seek(0)
    len(room.read())
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_memory_that_two_processes_share_counts_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SHARING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        stdout = process.stdout
        if stdout is None:
            pytest.fail("no pipe")
        pids = [int(stdout.readline()) for _ in range(2)]
        shared, each = physical_memory_bytes(pids), peak_memory_bytes(pids)
        process.communicate()

    assert 64 << 20 < shared < 96 << 20
    assert each > 128 << 20


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"]) as process:
        process.wait()

        with pytest.raises(TrainingError, match="has ended"):
            physical_memory_bytes([process.pid])
