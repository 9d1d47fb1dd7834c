"""The kernel's counts of this process (Linux): its resident memory, and how long a thread works and waits."""

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import TrainingError

# numbers of the C library's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OWN_MAPPING_BYTES = 64 * 1024
_FORGET_PEAK = "5"


@dataclass(frozen=True)
class Resident:
    """Resident memory of a process, in bytes.

    Attributes:
        files: Now; code and files that are mapped.
        peak: The most of both together since `reset_peak`.
    """

    anonymous: int
    files: int
    peak: int


def give_back_freed_memory() -> None:
    """Let each tensor of some size have a mapping of its own, which goes back to the kernel when it is freed.

    So the kernel's peak is that of living tensors, and not that of what an allocator keeps. It costs time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(name, _OWN_MAPPING_BYTES)


def reset_peak(pid: int | None = None) -> None:
    """Begin the peak of this process or of another one of the same user anew."""
    try:
        Path(f"/proc/{pid or 'self'}/clear_refs").write_text(_FORGET_PEAK, encoding="ascii")
    except OSError as exc:
        raise TrainingError(f"bench: this system does not measure a peak of memory anew ({exc.strerror})") from exc


def read_resident(pid: int | None = None) -> Resident:
    """Return the memory of this process, or of another one.

    Source: proc_pid_status(5): psutil has no peak of a process on Linux.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii").splitlines()
        sizes = {row.partition(":")[0]: row.partition(":")[2].split() for row in lines}
        anonymous, files, peak = (int(sizes[name][0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM"))
    except (OSError, LookupError, ValueError) as exc:
        raise TrainingError(
            f"bench: process {pid or os.getpid()} has ended, or this system does not tell its memory"
        ) from exc
    return Resident(anonymous, files, peak)


def added_at_peak(before: Resident, pid: int | None = None) -> int:
    """Return the bytes by which the anonymous memory rose above `before` since the peak was forgotten.

    Files are only ever added while a process works, so the current files count for the peak.
    """
    now = read_resident(pid)
    return max(0, now.peak - now.files - before.anonymous)


_FILE = Path("/proc/thread-self/schedstat")
_NS = 1e-9


@dataclass(frozen=True)
class ThreadSample:
    """A moment of one thread.

    Attributes:
        taken_s: Seconds on a core, and in the queue for one, so far; None where the system does not tell.
    """

    wall_s: float
    taken_s: float | None

    @classmethod
    def sample_thread(cls) -> "ThreadSample":
        """This moment of the calling thread."""
        try:
            on_core, queued, *_ = _FILE.read_text(encoding="ascii").split()
            taken = (int(on_core) + int(queued)) * _NS
        except (OSError, ValueError):
            return cls(time.perf_counter(), None)
        return cls(time.perf_counter(), taken)

    def waited_since(self, before: "ThreadSample") -> float | None:
        """Seconds since another moment in which this thread waited for something else than a core."""
        if self.taken_s is None or before.taken_s is None:
            return None
        return max(0.0, self.wall_s - before.wall_s - (self.taken_s - before.taken_s))
