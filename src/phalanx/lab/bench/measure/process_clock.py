"""CPU time and memory of other processes, read from outside, so that every arm is measured alike."""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable
from pathlib import Path

from phalanx.errors import TrainingError
from phalanx.pipeline.processes.fork_server import PROCESS_NAME

_QUIET_WINDOW_S = 0.03
_QUIET_SHARE = 0.03
_POLL_S = 0.005


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have used so far, all their threads included.

    Raises:
        TrainingError: One of them has ended.

    Source: POSIX clock_getcpuclockid; nanoseconds where /proc/PID/stat counts in 10 ms.
    """
    return sum(time.clock_gettime(_clock_of(pid)) for pid in pids)


def marked_cpu_seconds(mark: str) -> float:
    """Return CPU seconds of all processes with this mark in their environment (Linux), and of their ended children.

    Frameworks start processes that leave their starter, and others that live for a second; 10 ms are told apart.
    """
    ticks = 0
    for place in Path("/proc").glob("[0-9]*"):
        # processes end while they are looked at, and others' may not be
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                ticks += sum(map(int, (place / "stat").read_text("utf-8").rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(pids: Iterable[int]) -> int:
    """Sum of the largest resident sizes that these processes have had so far (Linux); shared pages count for each.

    Raises:
        TrainingError: One of them has ended, or this system does not tell.
    """
    return sum(_peak_bytes(pid) for pid in pids)


def process_tree(root: int) -> list[int]:
    """A process, its children, theirs and so on (Linux), each parent before its children.

    Workers are forked from a server, so that they are grandchildren of whatever has them.
    """
    processes = [root]
    for parent in processes:
        children: list[int] = []
        # a process may end while it is looked at
        with contextlib.suppress(OSError):
            for listing in sorted(Path(f"/proc/{parent}/task").glob("*/children")):
                children += [int(word) for word in listing.read_text(encoding="ascii").split()]
        processes += sorted(children)
    return processes


def worker_name(pid: int) -> str | None:
    """Return the worker name of a process (Linux): by its file, or by the name that a fork server gave it.

    None: it is no worker, or is gone.
    """
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").partition(" (")[2].rpartition(") ")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if rest.startswith(("Z", "X")) or name == PROCESS_NAME:
        return None
    if name.startswith("worker-"):
        return name
    file = Path(command[-2].decode(errors="replace")) if len(command) > 1 else Path()
    return file.stem if file.suffix == ".toml" else None


def wait_until_quiet(pids: list[int], timeout_s: float) -> float:
    """Wait until these processes do nothing any more.

    Returns:
        The `time.perf_counter` at which they last did something, to a few milliseconds.

    Raises:
        TrainingError: They are still busy after `timeout_s`, or one has ended.
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


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        (kibibytes,) = (int(row.split()[1]) for row in lines if row.startswith("VmHWM:"))
    except (OSError, ValueError) as exc:
        raise TrainingError(f"bench: process {pid} has ended, or this system does not tell its memory") from exc
    return kibibytes * 1024


def _clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        raise TrainingError(f"bench: process {pid} has ended; see its log")
    return clock.value
