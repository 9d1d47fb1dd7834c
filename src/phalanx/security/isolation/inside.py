"""The child's side of the sandbox: ``python -m phalanx.security.isolation.inside ORDER``, started by `start_isolated`.

Two processes. The outer one takes namespaces, makes itself unreadable and forks; it then waits, and ends the inner one
when the starter ends. The inner one is born unreadable, in memory that no process could open before, and belongs to the
starter's user namespace as far as debugging goes; so it is confined and runs the module itself. A program started by
exec instead would be readable at its start, and its memory would belong to the sandbox's user namespace, over which
every process of the same user has all rights.
"""

import json
import os
import runpy
import select
import signal
import sys
import tempfile
from typing import Any

from phalanx.security.isolation.landlock import python_needs, restrict_files
from phalanx.security.isolation.memory import find_secret_memory, prevent_swapping
from phalanx.security.isolation.namespaces import enter_namespaces, mount_own_processes, mount_scratch, remove_scratch
from phalanx.security.isolation.process import become_unreadable, die_with_parent, find_unreadable, give_up_rights
from phalanx.security.isolation.report import IsolationReport, MeasureFinding
from phalanx.security.isolation.sandbox import SandboxArguments
from phalanx.security.isolation.system_calls import load_library, refuse_system_calls

REFUSED_TO_RUN = 78
_STANDARD = (0, 1, 2)


def main(order: SandboxArguments) -> None:
    """Split into a waiting parent process and a child that runs the module."""
    starter = os.pidfd_open(order.starter)
    if os.getppid() != order.starter:
        # it ended before this line, and its number may be another process's by now
        sys.exit(REFUSED_TO_RUN)
    process, seccomp = os.pidfd_open(os.getpid()), load_library()
    # where the caller has named a directory for temporary files, that is the one
    scratch = None if "TMPDIR" in os.environ else tempfile.mkdtemp(prefix="phalanx-sandbox-")
    namespaces = enter_namespaces()
    become_unreadable()
    child = os.fork()
    if child:
        _write_json(order.report_fd, {"pid": child})
        _keep_only(starter)
        code = _watch_child(child, starter)
        if scratch is not None:
            remove_scratch(scratch)
        os._exit(code)
    findings = _confine_process(order, process, seccomp, namespaces, scratch)
    if IsolationReport(findings).missing_measures(order.sandbox.required_measures):
        os._exit(REFUSED_TO_RUN)
    sys.argv = [order.program.module, *order.program.arguments]
    runpy.run_module(order.program.module, run_name="__main__", alter_sys=True)


def _confine_process(
    order: SandboxArguments, parent: int, seccomp: Any, namespaces: MeasureFinding, scratch: str | None
) -> tuple[MeasureFinding, ...]:
    """Close everything around this process, and report; the order matters: each step needs what later ones close."""
    dies, unreadable = die_with_parent(parent), find_unreadable()
    shows_own = namespaces.holds and mount_own_processes()
    writable = (*order.sandbox.writable, *(_own_scratch(scratch) if shows_own and scratch else ()))
    findings = [namespaces, dies, unreadable, find_secret_memory(), prevent_swapping(), *give_up_rights()]
    _keep_only(order.report_fd, *order.program.inherited)
    findings.append(restrict_files(order.sandbox.readable, writable, python_needs(with_processes=shows_own)))
    findings.append(refuse_system_calls(seccomp))
    report = IsolationReport(tuple(findings))
    _write_json(order.report_fd, report.to_json())
    os.close(order.report_fd)
    return report.findings


def _own_scratch(path: str) -> tuple[str, ...]:
    """Give the program a directory in memory for temporary files; only where mounts are its own."""
    if not mount_scratch(path):
        return ()
    os.environ["TMPDIR"] = tempfile.tempdir = path
    os.environ.setdefault("HOME", path)
    return (path,)


def _watch_child(child: int, starter: int) -> int:
    """Wait for the child, or end it when the starter ends or says so; return an exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    ended, poller = os.pidfd_open(child), select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(starter, select.POLLIN)
    if any(fd == starter for fd, _ in poller.poll()):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _keep_only(*kept: int) -> None:
    """Close every file descriptor but these and the standard ones."""
    previous = -1
    for fd in (*sorted({*_STANDARD, *kept}), os.sysconf("SC_OPEN_MAX")):
        # an empty range that begins at 0 would be taken for all of them
        if previous + 1 < fd:
            os.closerange(previous + 1, fd)
        previous = fd


def _write_json(fd: int, value: dict[str, Any]) -> None:
    os.write(fd, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main(SandboxArguments.from_text(sys.argv[1]))
