"""The starter's side: start a program in a sandbox, and hear what holds before relying on it."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.errors import IsolationError
from phalanx.security.isolation.report import IsolationReport, findings_from_json
from phalanx.security.isolation.sandbox import Program, Sandbox, SandboxArguments

_HANDED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
_STOP_S = 5.0
_OWN_PLACE = str(Path(__file__).resolve().parents[3])
"""Directory that this very package is imported from."""


class IsolatedProcess(Closeable):
    """A program that runs in a sandbox."""

    def __init__(self, outer: "subprocess.Popen[bytes]", report: IsolationReport, pid: int) -> None:
        self._outer, self.report, self.pid = outer, report, pid

    def poll(self) -> int | None:
        """Return its exit code, 128 and more for a signal; None while it runs."""
        return self._outer.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end and return its exit code.

        Raises:
            IsolationError: It still runs after so many seconds.
        """
        try:
            return self._outer.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise IsolationError(f"isolated process {self.pid}: still runs after {timeout_s} s") from exc

    def close(self) -> None:
        """End it at once if it still runs; closing twice is harmless."""
        _end_process(self._outer)

    def __repr__(self) -> str:
        return f"IsolatedProcess(pid={self.pid})"


def start_isolated(program: Program, sandbox: Sandbox, timeout_s: float = 30.0) -> IsolatedProcess:
    """Start a Python module in a sandbox and return once it is confined.

    Standard output and error are the starter's; standard input is empty. What the starter can import the program can,
    except from the working directory. Temporary files lie in memory of its own, unless the program's
    environment names a ``TMPDIR``.

    Args:
        sandbox: Reachable files and sockets, and the measures that may be missing.
        timeout_s: Time limit of the confinement; the program's own work does not count.

    Raises:
        IsolationError: A measure that is required does not hold, or the child said nothing. No line of the
            program was run then.

    Guarantees:
        The program cannot open a file that is not named, reach a network, start a program, or see or trace another
        process; no other user can read its memory, and no other process of the same user that is not root. It ends when
        its starter does. Root of the machine, its owner and the kernel see everything.
    """
    reading, writing = os.pipe()
    try:
        order = SandboxArguments(program, sandbox, os.getpid(), writing)
        outer = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
            [sys.executable, "-P", "-m", "phalanx.security.isolation.inside", order.to_text()],
            stdin=subprocess.DEVNULL,
            env=_build_environment(program),
            pass_fds=(writing, *program.inherited),
        )
    except OSError as exc:
        os.close(reading)
        raise IsolationError(f"{sys.executable}: cannot be started ({exc.strerror})") from exc
    finally:
        os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            pid, report = _read_report(_receive_report(pipe.fileno(), timeout_s))
        _check_report(report, sandbox)
    except BaseException:
        _end_process(outer)
        raise
    return IsolatedProcess(outer, report, pid)


def _build_environment(program: Program) -> dict[str, str]:
    handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    # the working directory may hold anything, and what Python may import it may read
    places = [place for place in sys.path if os.path.isabs(place) and place != os.getcwd()]
    places += [_OWN_PLACE] if _OWN_PLACE not in places else []
    return {**handed_on, "PYTHONPATH": os.pathsep.join(places), **program.environment}


def _receive_report(fd: int, timeout_s: float) -> bytes:
    """Read until the child closes its end: before it runs the program, or when it ends."""
    data, limit = b"", time.monotonic() + timeout_s
    while True:
        remaining = limit - time.monotonic()
        if remaining <= 0 or not select.select([fd], [], [], remaining)[0]:
            raise IsolationError(f"isolation: the child did not report within {timeout_s} s")
        chunk = os.read(fd, 65536)
        if not chunk:
            return data
        data += chunk


def _read_report(data: bytes) -> tuple[int, IsolationReport]:
    message: dict[str, Any] = {}
    try:
        for row in data.splitlines():
            message |= json.loads(row)
        return int(message["pid"]), IsolationReport(findings_from_json(message))
    except (ValueError, KeyError, TypeError) as exc:
        raise IsolationError("isolation: the child ended before it was confined; its error output says why") from exc


def _check_report(report: IsolationReport, sandbox: Sandbox) -> None:
    if lacking := report.missing_measures(sandbox.required_measures):
        reasons = "; ".join(f"{finding.measure.value}: {finding.detail}" for finding in lacking)
        raise IsolationError(f"isolation: nothing was run, for what is required does not hold: {reasons}")


def _end_process(outer: "subprocess.Popen[bytes]") -> None:
    if outer.poll() is None:
        outer.terminate()
        try:
            outer.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            # the inner process is ended by the kernel with the outer one
            outer.kill()
    outer.wait()
