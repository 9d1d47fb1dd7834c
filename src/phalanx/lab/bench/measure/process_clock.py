"""CPU time and memory of other processes, read from outside, so that every arm is measured alike."""

import contextlib
import ctypes
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.resident import read_resident
from phalanx.pipeline.processes.fork_server import PROCESS_NAME

_QUIET_WINDOW_S = 0.03
_QUIET_SHARE = 0.03
_POLL_S = 0.005


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have used so far, all their threads included.

    Source: POSIX clock_getcpuclockid; nanoseconds where /proc/PID/stat, and psutil with it, counts in 10 ms.
    """
    return sum(time.clock_gettime(_clock_of(pid)) for pid in pids)


def marked_cpu_seconds(mark: str) -> float:
    """Return CPU seconds of all processes with this mark in their environment, and of their ended children.

    Frameworks start processes that leave their starter, and others that live for a second; 10 ms are told apart.
    """
    name, _, value = mark.partition("=")
    seconds = 0.0
    for process in psutil.process_iter():
        # processes end while they are looked at, and others' may not be
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def peak_memory_bytes(pids: Iterable[int]) -> int:
    """Sum of the largest resident sizes that these processes have had so far (Linux); shared pages count for each."""
    return sum(read_resident(pid).peak for pid in pids)


def physical_memory_bytes(pids: Iterable[int]) -> int:
    """Sum of the memory that these processes take now (Linux); a page that several share counts once in all.

    Forked workers share the libraries that their starter has imported, which a sum of resident sizes counts for each.
    """
    try:
        return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
    except (psutil.Error, AttributeError) as exc:
        raise TrainingError("bench: a process has ended, or this system does not tell its share of memory") from exc


def process_tree(root: int) -> list[int]:
    """A process, its children, theirs and so on, each parent before its children.

    Workers are forked from a server, so that they are grandchildren of whatever has them.
    """
    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [root]


def worker_name(pid: int) -> str | None:
    """Return the worker name of a process: by its file, or by the name that a fork server gave it.

    None: it is no worker, or is gone.
    """
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        name, command = process.name(), process.cmdline()
    except psutil.Error:
        return None
    if name == PROCESS_NAME or name.startswith("worker-"):
        return None if name == PROCESS_NAME else name
    file = Path(command[-1]) if command else Path()
    return file.stem if file.suffix == ".toml" else None


def wait_until_quiet(pids: list[int], timeout_s: float) -> float:
    """Wait until these processes do nothing any more.

    Returns:
        The `time.perf_counter` at which they last did something, to a few milliseconds.
    """
    deadline = time.perf_counter() + timeout_s
    last_busy, used_then = time.perf_counter(), cpu_seconds(pids)
    while True:
        time.sleep(_POLL_S)
        now, used = time.perf_counter(), cpu_seconds(pids)
        if used - used_then > _QUIET_SHARE * _QUIET_WINDOW_S:
            last_busy, used_then = now, used
        elif now - last_busy > _QUIET_WINDOW_S:
            return last_busy
        if now > deadline:
            raise TrainingError(f"bench: processes {pids} are still busy {timeout_s:.0f} s after their last step")


def _clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        raise TrainingError(f"bench: process {pid} has ended; see its log")
    return clock.value
