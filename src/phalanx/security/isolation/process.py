"""Measures about the process itself: it is unreadable, it has no rights, and it does not outlive its starter."""

import os
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path

from phalanx.security.isolation import kernel
from phalanx.security.isolation.report import Measure, MeasureFinding


def become_unreadable() -> None:
    """Close this process to debuggers, core dumps and /proc for all but root; the next child is born like that."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kernel.set_process_property(kernel.PR_SET_DUMPABLE, 0)


def find_unreadable() -> MeasureFinding:
    """Find out whether this process was born unreadable and is not traced; /proc must still be the starter's."""
    try:
        status = _read_status()
        if kernel.set_process_property(kernel.PR_GET_DUMPABLE) != 0 or resource.getrlimit(resource.RLIMIT_CORE) != (
            0,
            0,
        ):
            return MeasureFinding(Measure.UNREADABLE, False, "core dumps could not be switched off")
    except OSError as exc:
        return MeasureFinding(Measure.UNREADABLE, False, f"{exc.filename or 'prctl'}: {exc.strerror}")
    if (tracer := status.get("TracerPid", "")) != "0":
        return MeasureFinding(
            Measure.UNREADABLE, False, f"process {tracer or '?'} traces it; start it without a debugger"
        )
    user = "root: whoever is root reads it" if os.geteuid() == 0 else "an ordinary user's"
    return MeasureFinding(
        Measure.UNREADABLE, True, f"no debugger, no core dump, since before its first line; it is {user}"
    )


def die_with_parent(parent_fd: int) -> MeasureFinding:
    """Have the kernel end this process when its parent ends."""
    try:
        kernel.set_process_property(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    except OSError as exc:
        return MeasureFinding(Measure.DIES_WITH_STARTER, False, f"prctl: {exc.strerror}")
    # it may have ended before the kernel was asked
    if select.select([parent_fd], [], [], 0)[0]:
        return MeasureFinding(Measure.DIES_WITH_STARTER, False, "the starter has ended")
    return MeasureFinding(Measure.DIES_WITH_STARTER, True, "ended by the kernel when its starter ends")


def give_up_rights() -> tuple[MeasureFinding, MeasureFinding]:
    """Drop all capabilities, and the way to get new ones by starting a program."""
    return (
        _status_finding(Measure.NO_CAPABILITIES, kernel.drop_capabilities, "CapEff", "none is left"),
        _status_finding(
            Measure.NO_NEW_PRIVILEGES,
            lambda: kernel.set_process_property(kernel.PR_SET_NO_NEW_PRIVS, 1),
            "NoNewPrivs",
            "programs with the set-user-id bit gain nothing",
        ),
    )


def _status_finding(measure: Measure, act: Callable[[], object], field: str, detail: str) -> MeasureFinding:
    try:
        act()
        value = int(_read_status()[field], 16)
    except OSError as exc:
        return MeasureFinding(measure, False, str(exc.strerror))
    except (KeyError, ValueError):
        return MeasureFinding(measure, False, f"/proc/self/status does not show {field}")
    expected = 1 if measure == Measure.NO_NEW_PRIVILEGES else 0
    return MeasureFinding(measure, value == expected, detail if value == expected else f"{field} is {value:x}")


def _read_status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (text.partition(":") for text in lines)
    return {name: value.strip() for name, _, value in pairs}
