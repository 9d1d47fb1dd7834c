"""The fork server: a process that has imported what workers need, and forks a worker on each request.

It never computes, opens no connection and starts no thread, so that its forks inherit no lock in a strange state. Its
children end with it, and it ends with the owner. It is a program of its own, or the owner's process before its first
connection, thread and key (ADR 74).
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Never

import psutil

from phalanx.child import PARENT, die_with_parent
from phalanx.config import StrictModel

FORK_SERVER = "-"
"""Argument in the place of a worker file: files come on standard input, one request a line."""

PROCESS_NAME = "fork-server"
"""The name of the process, as `ps -o comm` shows it; that of a worker is the worker's."""

_PR_SET_NAME = 15


class ForkRequest(StrictModel):
    """A request to start the worker of a file, or, without one, to end it."""

    name: str
    file: str | None = None
    log: str | None = None


class WorkerEvent(StrictModel):
    """A report that a worker was started, or, with a code, has ended."""

    name: str
    pid: int
    code: int | None = None


def can_fork() -> bool:
    """Whether this system supports a fork server (Linux)."""
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open")


def await_request(modules: Collection[str] = ()) -> Path | None:
    """Serve requests on standard input until it is closed.

    Args:
        modules: Imported first; a module that cannot be imported is left to the worker that needs it.

    Returns:
        In each forked worker the file that it is to serve; None in this process itself, at the end.
    """
    # what libraries print must not be taken for a report
    answers = os.dup(1)
    os.dup2(2, 1)
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # this very program, with a file of its owner's
    return _RequestLoop(answers, sys.orig_argv[:-1]).serve_requests()


def serve_from_here(requests: int, answers: int, command: Sequence[str], serve: Callable[[Path], int]) -> Never:
    """Be the fork server that `fork_here` has made, or one of its workers; never returns.

    Args:
        requests: Handle from which requests are read.
        answers: Handle to which reports are written.
        command: Program and arguments of a worker without its file, for one that cannot be forked.
        serve: Called with its file in each worker; returns the exit code.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(requests, 0)
        os.dup2(2, 1)
        os.close(requests)
        file = _RequestLoop(answers, command).serve_requests()
        if file is None:
            code = 0
        else:
            die_with_parent()
            code = serve(file)
    except BaseException:  # noqa: BLE001 - the caller's own handlers belong to the owner's process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _RequestLoop:
    def __init__(self, answers: int, command: Sequence[str]) -> None:
        self._answers = answers
        self._command = command
        self._children: dict[int, tuple[str, int]] = {}
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._unread = b""

    def serve_requests(self) -> Path | None:
        _set_name(PROCESS_NAME)
        # a collection in a worker would write to every page that it shares
        gc.collect()
        gc.freeze()
        while True:
            for handle, _ in self._poll.poll():
                if handle != 0:
                    self._reap_worker(handle)
                    continue
                received = os.read(0, 2**16)
                if not received:
                    return None
                *lines, self._unread = (self._unread + received).split(b"\n")
                for request_line in lines:
                    forked = self._serve_request(ForkRequest.model_validate_json(request_line))
                    if forked is not None:
                        return forked

    def _serve_request(self, order: ForkRequest) -> Path | None:
        if order.file is None or order.log is None:
            for handle, (name, _) in self._children.items():
                if name == order.name:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            return None
        here = str(os.getpid())
        # a library that has started a thread makes forking unsafe: start from nothing then
        pid = os.fork() if is_single_threaded() else _start_program([*self._command, order.file], order.log, here)
        if pid == 0:
            self._detach_from_server(order.name, order.log, here)
            return Path(order.file)
        handle = os.pidfd_open(pid)
        self._children[handle] = (order.name, pid)
        self._poll.register(handle, select.POLLIN)
        self._send_event(WorkerEvent(name=order.name, pid=pid))
        return None

    def _detach_from_server(self, name: str, log: str, parent: str) -> None:
        """Close, in a forked worker, everything that belongs to the fork server."""
        os.setpgid(0, 0)
        for handle in (self._answers, *self._children):
            os.close(handle)
        null, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(output)
        os.environ[PARENT] = parent
        _set_name(name)

    def _reap_worker(self, handle: int) -> None:
        name, pid = self._children.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        self._send_event(WorkerEvent(name=name, pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _send_event(self, news: WorkerEvent) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answers, news.model_dump_json().encode() + b"\n")


def is_single_threaded() -> bool:
    """Whether this process has one thread, library threads included."""
    return psutil.Process().num_threads() == 1


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _start_program(command: Sequence[str], log: str, parent: str) -> int:
    with open(log, "ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own program with a file of its owner's
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, PARENT: parent},
        )
    # its end is seen and told like that of every other child
    process.returncode = 0
    return process.pid
