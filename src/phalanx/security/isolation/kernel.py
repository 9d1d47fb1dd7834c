"""Calls to the Linux kernel for which Python 3.11 has no function; each fails as an OSError.

Source: Linux man-pages, prctl(2), unshare(2), mount(2), capset(2), landlock(7), memfd_secret(2).
"""

import ctypes
import os

PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE = 1, 3, 4
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 23, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
# the same numbers on every architecture: all of them came after the tables were unified
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF, MEMFD_SECRET = 444, 445, 446, 447
_DETACH = 2
_LOCK_CURRENT, _LOCK_FUTURE, _LOCK_ON_FAULT = 1, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def set_process_property(option: int, value: int = 0) -> int:
    """Set or ask for a property of this process."""
    return _check_result(_libc.prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))), "prctl")


def unshare_namespaces(flags: int) -> None:
    """Give this process namespaces of its own; it must have one thread."""
    _check_result(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount_filesystem(source: str | None, target: str, kind: str | None, flags: int) -> None:
    """Mount a file system, or change how one is shared."""
    names = (None if name is None else name.encode() for name in (source, target, kind))
    _check_result(_libc.mount(*names, ctypes.c_ulong(flags), None), f"mount {target}")


def unmount_filesystem(target: str) -> None:
    """Detach the topmost mount of a directory; the kernel removes it when no process uses it any more."""
    _check_result(_libc.umount2(target.encode(), ctypes.c_int(_DETACH)), f"unmount {target}")


def lock_memory() -> None:
    """Keep every page of this process in memory, now and later, once it is used."""
    _check_result(_libc.mlockall(ctypes.c_int(_LOCK_CURRENT | _LOCK_FUTURE | _LOCK_ON_FAULT)), "mlockall")


def system_call(number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call that the C library has no name for."""
    wide = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    return _check_result(_libc.syscall(ctypes.c_long(number), *wide), f"system call {number}")


def drop_capabilities() -> None:
    """Give up every right beyond the rights of the user, for good."""
    set_process_property(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    capability = 0
    while True:
        try:
            if set_process_property(PR_CAPBSET_READ, capability):
                _drop_from_bounding_set(capability)
        except OSError:
            # beyond the last one that this kernel has
            break
        capability += 1
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check_result(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _drop_from_bounding_set(capability: int) -> None:
    try:
        set_process_property(PR_CAPBSET_DROP, capability)
    except PermissionError:
        # only a process that may set capabilities can shrink the set; without new privileges it gains nothing
        return


def _check_result(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
