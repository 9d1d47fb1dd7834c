"""System calls that the program has no use for and an intruder has, refused by seccomp.

A list of refused calls, not of allowed ones: interpreters and numeric libraries use too many to name, and change them
with every version. Calls of another architecture's table end the process.

Source: Linux man-pages, seccomp(2); libseccomp.
"""

import errno
import importlib
from typing import Any

from phalanx.security.isolation.kernel import PR_SET_DUMPABLE
from phalanx.security.isolation.report import Measure, MeasureFinding

REFUSED = {
    "network": ("socket", "connect", "bind"),
    "programs": ("execve", "execveat"),
    "other processes": (
        "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp", "perf_event_open",
    ),
    "namespaces and mounts": (
        "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig",
        "fsmount", "fspick", "mount_setattr", "name_to_handle_at", "open_by_handle_at",
    ),
    "the kernel": (
        "bpf", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "init_module", "finit_module",
        "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "quotactl", "syslog",
        "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "add_key", "request_key", "keyctl",
    ),
}  # fmt: skip
"""System calls by the kind of access that they would give."""
_SET_PTRACER = 0x59616D61
_NEW_USERS = 0x10000000


def load_library() -> Any:
    """Return pyseccomp, or None; it looks for libseccomp by starting programs, so before the sandbox is closed."""
    try:
        return importlib.import_module("pyseccomp")
    except (ImportError, RuntimeError, OSError):
        return None


def refuse_system_calls(seccomp: Any) -> MeasureFinding:
    """Refuse them to this process and its children, for good."""
    if seccomp is None:
        return MeasureFinding(
            Measure.SYSTEM_CALLS,
            False,
            "pyseccomp or libseccomp is missing; pip install phalanx-train[sandbox], and the system's libseccomp2",
        )
    try:
        rules = seccomp.SyscallFilter(seccomp.ALLOW)
        rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
        not_allowed = seccomp.ERRNO(errno.EPERM)
        for names in REFUSED.values():
            for name in names:
                rules.add_rule(not_allowed, name)
        # a process that made itself readable again, or took a debugger, could be read
        for option in (PR_SET_DUMPABLE, _SET_PTRACER):
            # masked: the kernel looks at 32 bits, and the others could hide the number from a comparison
            rules.add_rule(not_allowed, "prctl", seccomp.Arg(0, seccomp.MASKED_EQ, 0xFFFFFFFF, option))
        rules.add_rule(not_allowed, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _NEW_USERS, _NEW_USERS))
        # its flags are in memory, where no filter can look: the C library falls back to clone
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
        rules.load()
    except OSError as exc:
        return MeasureFinding(Measure.SYSTEM_CALLS, False, f"seccomp: {exc.strerror}; kernel or libseccomp is too old")
    return MeasureFinding(Measure.SYSTEM_CALLS, True, f"{sum(map(len, REFUSED.values()))} system calls are refused")
