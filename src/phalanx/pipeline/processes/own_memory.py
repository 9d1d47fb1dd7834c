"""The memory that this process can give to stages, the processes that share it, and the allocator's reserve."""

import ctypes
import hashlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

ALONE = ""
"""In the place of a name: memory that no other process of the run uses."""

_SHARE = 0.75
"""Of what is available; the rest is for buffers of the transport, for what the allocator keeps, and for others. With a
stage of 9.5 million numbers a holder's process grew by 1.37 times its footprint, a shadow's by 1.1 times."""

_UNLIMITED = 2**60
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def measure_own_memory(session: str, device: str = "cpu", memory_mib: int | None = None) -> dict[str, int]:
    """Return the bytes that this process may still use, by the name of the shared memory.

    Args:
        session: Session name; the same machine has another name in each session.
        memory_mib: Limit that the user sets, in place of the measured one.

    Returns:
        One entry for the machine and one for each control group with a limit, or one for the GPU; processes that share
        one of them give it the same name. Empty where the system does not tell.
    """
    if memory_mib is not None:
        return {ALONE: memory_mib * 2**20}
    if device.startswith("cuda"):
        return {memory_name(session, key): int(_SHARE * size) for key, size in _gpu_memory(device).items()}
    rooms = available_memory(_PROC, _GROUPS, psutil.virtual_memory().available)
    return {memory_name(session, key): int(_SHARE * size) for key, size in rooms.items()}


def available_memory(proc: Path, groups: Path, machine_bytes: int) -> dict[str, int]:
    """Bytes that are free or can be freed, on the machine and in each control group above this process (Linux).

    Args:
        proc: Mount point of the proc file system.
        groups: Mount point of control groups, of version 1 or 2.
        machine_bytes: Bytes that are free, or can be freed, on the whole machine.
    """
    try:
        machine = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return {}
    rooms = {machine: machine_bytes}
    for directory in _own_groups(proc, groups):
        bytes_left = _free_bytes_in(directory)
        if bytes_left is not None:
            rooms[f"{machine} {directory.stat().st_ino}"] = bytes_left
    return rooms


def memory_name(session: str, what: str) -> str:
    """A name for what memory belongs to: equal in one session where it is the same, and of no use beyond."""
    return hashlib.sha256(f"phalanx memory {session} {what}".encode()).hexdigest()[:16]


def _own_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """The directories of this process's control groups, from its own one up to where they are mounted."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for row in lines:
        _, controllers, path = row.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        group = root / path.lstrip("/")
        # in a container the path can be one of the host's, and what is mounted is the container's own
        directory = group if ".." not in group.parts and group.is_dir() else root
        while directory.is_dir():
            yield directory
            if directory == root:
                break
            directory = directory.parent


def _free_bytes_in(group: Path) -> int | None:
    """Bytes up to a control group's limit, files that can be dropped included; None where it has no limit."""
    names = ("memory.max", "memory.current", "")
    if (group / "memory.limit_in_bytes").exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    try:
        limit = (group / names[0]).read_text(encoding="ascii").strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((group / names[1]).read_text(encoding="ascii"))
        counts = dict(row.split() for row in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        files = sum(int(counts.get(f"{names[2]}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + files)


def _gpu_memory(device: str) -> dict[str, int]:
    free, _ = torch.cuda.mem_get_info(device)
    return {str(getattr(torch.cuda.get_device_properties(device), "uuid", device)): free}


# numbers of the C library's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 2**31 - 1
_STEP_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Let this process keep freed memory instead of giving it back to the kernel after each tensor.

    A stage frees and allocates the same few hundred megabytes at every microbatch. With glibc's own
    setting each activation is mapped anew and every page of it faults in again: 54,000 faults a step of a
    10 million parameter model against 2,000 with this one, and 7 % of the CPU time. The process keeps
    the memory of its peak until it ends. No result changes.

    Returns:
        Whether the C library has this setting; others than glibc may not, and go on as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _STEP_BYTES))
    return all([mallopt(name, value) == 1 for name, value in settings])
