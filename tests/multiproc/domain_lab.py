"""Runs of one domain as real processes: a run file, its undisturbed curve, and the process of each rank."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import TINY, Place, Process, children_of, exists

from machine_patience import patience_s
from phalanx.telemetry import read_metrics

PATIENCE_S = 400.0
ALONE = ("--set", "parallel.restarts=0")
"""Rank 0 is the process that is started, and nothing is started again."""
DOMAIN = (
    TINY.partition("[pipeline]")[0]
    .replace("steps = 8", "steps = 60")
    .replace("batch_size = 8", "batch_size = 12")
    # every number of copies from 1 to 3 cuts the batch into equal shares
    .replace("microbatches = 4", "microbatches = 2")
    .replace("validate_every = 4", "validate_every = 30")
    + """
[checkpoint]
every = 5

[parallel]
dp = 2
min_dp = 1
max_dp = 3
silence_s = 12.0
"""
)


def write_domain(place: Place) -> Path:
    """The run file of a domain in this directory."""
    path = place.path / "domain.toml"
    path.write_text(DOMAIN)
    return path


def train_domain(place: Place, *options: str, run_dir: str = "run") -> Process:
    """Start `phalanx train` on it."""
    return place.start("train", str(write_domain(place)), "--run-dir", str(place.path / run_dir), *options)


def launch_domain(place: Place, *options: str, run_dir: str = "run") -> Process:
    """Start `phalanx launch` on it."""
    return place.start("launch", str(write_domain(place)), "--run-dir", str(place.path / run_dir), *options)


def below(pid: int) -> dict[int, str]:
    """Every process below a process, with their command lines."""
    found, waiting = {}, [pid]
    while waiting:
        children = children_of(waiting.pop())
        found.update(children)
        waiting.extend(children)
    return found


def rank_pid(process: Process, rank: int) -> int:
    """Process id of a rank below a process; rank 0 of `phalanx train` is the child that has a number of ranks."""
    for pid, command in below(process.popen.pid).items():
        if "phalanx train" not in command:
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment or (rank == 0 and "--ranks" in command):
            return pid
    raise AssertionError(f"no rank {rank} below {process.popen.pid}: {below(process.popen.pid)}")


def wait_until(process: Process, condition: Callable[[], bool]) -> None:
    """Until something has happened in a run that goes on; each process of it takes seconds to begin."""
    deadline = time.monotonic() + patience_s(PATIENCE_S)
    while not condition():
        assert process.popen.poll() is None, process.text
        assert time.monotonic() < deadline, process.text
        time.sleep(0.005)


def wait_for_step(place: Place, process: Process, step: int) -> None:
    """Until a step has been made."""
    wait_until(process, lambda: place.has_line("metrics.jsonl", f'"step": {step},'))


def seconds_until_gone(process: Process, pid: int) -> float:
    """How long a process of a run stays, from now on."""
    started = time.monotonic()
    wait_until(process, lambda: not exists(pid))
    return time.monotonic() - started


def end_of(process: Process) -> int:
    """Exit code."""
    return process.popen.wait(patience_s(PATIENCE_S))


def finish(process: Process) -> float:
    """Wait for the end; seconds that it took."""
    started = time.monotonic()
    assert end_of(process) == 0, process.text
    return time.monotonic() - started


def losses(place: Place, run_dir: str = "run") -> list[float]:
    """The curve, a number for each step."""
    lines = read_metrics(place.path / run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(place.summary(run_dir)["steps"]))
    return [line["loss"] for line in lines]


def check_continued(place: Place, undisturbed: list[float], *, exact: bool = True) -> None:
    """The run is complete, and its curve is that of an undisturbed one: to the bit under one layout."""
    assert place.summary()["status"] == "completed"
    assert losses(place) == (undisturbed if exact else pytest.approx(undisturbed, rel=1e-5))
