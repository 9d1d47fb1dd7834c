"""Files: only named paths can be opened, by Landlock.

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable

from phalanx.security.isolation import kernel
from phalanx.security.isolation.report import Measure, MeasureFinding

_ASK_VERSION, _PATH_BENEATH = 1, 1
_OLDEST = 3
"""Linux 6.2: before, files that cannot be written could still be cut."""
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_IOCTL_DEVICE_SINCE, _NETWORK_SINCE, _SCOPES_SINCE = 5, 4, 6
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_SYSTEM = (
    "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache",
    "/etc/localtime", "/sys/devices/system",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def python_needs(*, with_processes: bool) -> tuple[str, ...]:
    """Return the paths that the interpreter reads while it imports modules and counts cores.

    Args:
        with_processes: Whether /proc shows the sandbox's own processes only, and may be read.
    """
    paths = (sys.prefix, sys.base_prefix, *sys.path, *_SYSTEM, *(("/proc",) if with_processes else ()))
    return tuple(dict.fromkeys(path for path in paths if os.path.isabs(path) and os.path.exists(path)))


def restrict_files(readable: Iterable[str], writable: Iterable[str], system: Iterable[str]) -> MeasureFinding:
    """Close every file to this process and its children, for good, but those below some paths.

    Args:
        readable: May be read; each must exist.
        writable: May be written, made and removed as well; each must exist.
        system: Paths that may be read.
    """
    try:
        version = kernel.system_call(kernel.LANDLOCK_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError as exc:
        return _lacking_finding(f"the kernel has no Landlock ({exc.strerror}); build it in and name it in lsm=")
    if version < _OLDEST:
        return _lacking_finding(f"Landlock of version {version}, expected {_OLDEST} or later (Linux 6.2)")
    # all rights about files that this version can take away
    num_rights = 15 if version < _IOCTL_DEVICE_SINCE else 16
    every = (1 << num_rights) - 1
    try:
        ruleset = kernel.system_call(kernel.LANDLOCK_CREATE_RULESET, *_describe_ruleset(version, every), 0)
        try:
            reading = _EXECUTE | _READ_FILE | _READ_DIRECTORY
            for path in (*system, *readable):
                _allow_path(ruleset, path, reading)
            for path in writable:
                _allow_path(ruleset, path, every & ~_EXECUTE)
            for path in _DEVICES:
                _allow_path(ruleset, path, _READ_FILE | _WRITE_FILE)
            kernel.system_call(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)
        finally:
            os.close(ruleset)
    except OSError as exc:
        return _lacking_finding(f"{exc.filename or 'Landlock'}: {exc.strerror}; every path of the sandbox must exist")
    return MeasureFinding(
        Measure.FILES, True, f"Landlock of version {version}: what Python needs and what the sandbox names"
    )


def _describe_ruleset(version: int, rights: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    network = 0b11 if version >= _NETWORK_SINCE else 0
    scopes = 0b11 if version >= _SCOPES_SINCE else 0
    fields = 1 + (version >= _NETWORK_SINCE) + (version >= _SCOPES_SINCE)
    described = struct.pack(f"={fields}Q", *(rights, network, scopes)[:fields])
    return ctypes.create_string_buffer(described, len(described)), len(described)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, place)
        kernel.system_call(
            kernel.LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0
        )
    finally:
        os.close(place)


def _lacking_finding(detail: str) -> MeasureFinding:
    return MeasureFinding(Measure.FILES, False, detail)
