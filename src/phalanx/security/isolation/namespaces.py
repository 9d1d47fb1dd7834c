"""Namespaces of its own: users, mounts, processes, network, IPC and host name.

Source: Linux man-pages, namespaces(7), user_namespaces(7), pid_namespaces(7).
"""

import contextlib
import os
from pathlib import Path

from phalanx.security.isolation.kernel import mount_filesystem, unmount_filesystem, unshare_namespaces
from phalanx.security.isolation.report import Measure, MeasureFinding

_MOUNTS, _HOST_NAME, _IPC, _USERS, _PROCESSES, _NETWORK = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
ALL = _MOUNTS | _HOST_NAME | _IPC | _USERS | _PROCESSES | _NETWORK
_RECURSIVE, _PRIVATE = 0x4000, 0x40000
_NO_SUID, _NO_DEVICES, _NO_PROGRAMS = 0x2, 0x4, 0x8


def enter_namespaces() -> MeasureFinding:
    """Leave the starter's namespaces; the processes' one holds for the next child only.

    The user keeps its number and is the only one: files look as they did, and no other user exists.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        unshare_namespaces(ALL)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as exc:
        return MeasureFinding(
            Measure.NAMESPACES,
            False,
            f"{exc.strerror}; allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
        )
    return MeasureFinding(Measure.NAMESPACES, True, "users, mounts, processes, network, IPC and host name of its own")


def mount_scratch(path: str) -> bool:
    """Mount memory over an empty directory, for this namespace alone: it is gone with the last process in it.

    Returns:
        Whether it worked; where it did not, the program has no directory for temporary files.
    """
    try:
        mount_filesystem("tmpfs", path, "tmpfs", _NO_SUID | _NO_DEVICES | _NO_PROGRAMS)
    except OSError:
        return False
    return True


def remove_scratch(path: str) -> None:
    """Give the memory back, and remove the directory."""
    with contextlib.suppress(OSError):
        unmount_filesystem(path)
    with contextlib.suppress(OSError):
        Path(path).rmdir()


def mount_own_processes() -> bool:
    """Show only the processes of this namespace under /proc.

    Returns:
        Whether it worked; where it did not, /proc stays closed to the program.
    """
    try:
        mount_filesystem(None, "/", None, _RECURSIVE | _PRIVATE)
        mount_filesystem("proc", "/proc", "proc", _NO_SUID | _NO_DEVICES | _NO_PROGRAMS)
    except OSError:
        return False
    return True
