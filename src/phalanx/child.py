"""Child processes: on a leash to their starter, ended by their ids, in good order or at once; and asked over pipes.

`AskedProcess` is the starter's side of the one protocol of helper processes, `answer_orders` the helper's. An order and
an answer have the same form: a line with the JSON array ``[message, size]``, and `size` bytes of content.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

STACK_SIGNAL = signal.SIGUSR1
"""Has a process that called `write_stacks_on_request` write the stacks of its threads to its log."""
PARENT = "PHALANX_PARENT"
"""Environment variable with the process id of a child's starter."""

Message = tuple[dict[str, Any], bytes]
"""JSON and the content beside it, of an order or an answer."""

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0
_SECONDS_FOR_STACKS = 0.5
_PIPE_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 27
"""A chat of 8 Mi characters, each of them escaped, takes up to 96 MiB."""
_MAX_CONTENT_BYTES = 1 << 33


class ChildProcess(ABC):
    """A process that was started here and is ended here."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Process id; None before it is known."""

    @abstractmethod
    def poll(self) -> int | None:
        """Exit code; None while it runs, negative for a signal."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None where it has not ended in time."""

    @abstractmethod
    def _send_kill(self) -> None:
        """Have it ended at once; its end need not be seen yet."""

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            self._send_kill()
            self.wait(_SECONDS_TO_END)

    def end_or_kill(self, timeout_s: float = _SECONDS_TO_END) -> None:
        """Give it, which has been told to end, a moment; then kill it."""
        if self.wait(timeout_s) is None:
            self.kill()

    def how_it_ended(self) -> str:
        """In words, for a message."""
        code = self.poll()
        if code is None:
            return "it has not ended"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


class PythonProcess(ChildProcess):
    """A child that runs a module; a terminal's Ctrl-C is for its starter, which ends it in good order.

    Args:
        log: Gets its output; where it is left out, that is the starter's.
        renew: Whether the log begins anew.
        piped: Whether standard input and output are pipes for lines of text; the log then gets standard error alone.
        program: What runs the command; this interpreter, which is given a module, where it is left out.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        *,
        renew: bool = False,
        piped: bool = False,
        program: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        self._log = log
        output = None if log is None else log.open("wb" if renew else "ab")
        try:
            self.popen = subprocess.Popen(  # noqa: S603 - our own interpreter and our own command
                [*program, *command],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output if piped or output is None else subprocess.STDOUT,
                text=True,
                process_group=0,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> int | None:
        return self.popen.poll()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            self.popen.terminate()

    def last_output(self, num_lines: int = 1) -> str:
        """The last lines of its log, for an error message."""
        return "(no output)" if self._log is None else last_lines(self._log, num_lines)

    def _send_kill(self) -> None:
        self.popen.kill()


class AskedProcess:
    """A child that answers orders, one at a time.

    Args:
        command: The module, which calls `answer_orders`, and its arguments.
        log: Gets the child's output; standard error of the starter where it is left out.

    Guarantees:
        A child that dies, hangs beyond a timeout, or sends a malformed answer is ended, its pipes are closed, and the
        caller gets an exception; memory is taken only for bytes that have arrived.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._process = PythonProcess(command, environment or {}, log, piped=True)
        self._lock = threading.RLock()
        self._starter = os.getpid()
        self._received = bytearray()
        # a write to a child that does not read must not wait beyond the timeout
        os.set_blocking(self._descriptor("stdin"), False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it can be asked."""
        return self._process.poll()

    @property
    def is_of_this_process(self) -> bool:
        """Whether it was started here, and not by the process that this one was forked from."""
        return self._starter == os.getpid()

    def ask(self, order: Mapping[str, Any], content: bytes = b"", timeout_s: float | None = None) -> Message:
        """Send an order and return its answer.

        Raises:
            EOFError: The child has ended, or sent a malformed answer; the text has how it ended and its last output.
            TimeoutError: There was no answer in time; the child is ended.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._send(order, content, deadline)
        return self._receive(deadline)

    def ask_all(self, order: Mapping[str, Any], content: bytes = b"") -> Iterator[Message]:
        """Send an order and yield its answers, up to one that has ``end`` or ``error``."""
        self._send(order, content, None)
        is_last = False
        while not is_last:
            answer, answer_content = self._receive(None)
            is_last = bool(answer.get("end")) or "error" in answer
            yield answer, answer_content

    def close(self) -> None:
        """End it at once and close its pipes; closing twice is harmless."""
        self._process.kill()
        # a thread that waits for an answer sees the end of the child, and leaves the pipes first
        with self._lock:
            for pipe in (self._process.popen.stdin, self._process.popen.stdout):
                if pipe is not None:
                    pipe.close()

    def _descriptor(self, name: str) -> int:
        pipe = getattr(self._process.popen, name)
        if pipe is None or pipe.closed:
            raise EOFError(self._describe_end())
        return int(pipe.fileno())

    def _send(self, order: Mapping[str, Any], content: bytes, deadline: float | None) -> None:
        frame = memoryview(_frame(order, content))
        # a child that has ended may have answered before
        with self._lock, contextlib.suppress(BrokenPipeError):
            descriptor = self._descriptor("stdin")
            while frame:
                self._await_event(descriptor, select.POLLOUT, deadline)
                frame = frame[os.write(descriptor, frame) :]

    def _receive(self, deadline: float | None) -> Message:
        with self._lock:
            searched = 0
            while (line_bytes := self._received.find(b"\n", searched) + 1) == 0:
                searched = len(self._received)
                if searched > _MAX_LINE_BYTES:
                    raise self._refuse_answer()
                self._read_pipe(deadline)
            try:
                answer, size = json.loads(self._take_bytes(line_bytes))
            except (ValueError, TypeError, RecursionError) as exc:
                raise self._refuse_answer() from exc
            if not (isinstance(answer, dict) and type(size) is int and 0 <= size <= _MAX_CONTENT_BYTES):
                raise self._refuse_answer()
            while len(self._received) < size:
                self._read_pipe(deadline)
            return answer, self._take_bytes(size)

    def _read_pipe(self, deadline: float | None) -> None:
        descriptor = self._descriptor("stdout")
        self._await_event(descriptor, select.POLLIN, deadline)
        data = os.read(descriptor, _PIPE_BYTES)
        if not data:
            raise self._end_of_child()
        self._received += data

    def _take_bytes(self, size: int) -> bytes:
        with memoryview(self._received) as view:
            data = bytes(view[:size])
        del self._received[:size]
        return data

    def _await_event(self, descriptor: int, event: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(descriptor, event)
        remaining_ms = None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())
        if not poller.poll(remaining_ms):
            self.close()
            raise TimeoutError("the child did not answer in time")

    def _end_of_child(self) -> EOFError:
        # a process that is ending closes its pipes a moment before its exit code is there
        self._process.wait(_SECONDS_TO_END)
        self.close()
        return EOFError(self._describe_end())

    def _refuse_answer(self) -> EOFError:
        self.close()
        return EOFError("it sent a malformed answer, and was ended")

    def _describe_end(self) -> str:
        return f"{self._process.how_it_ended()}; {self._process.last_output()}"


def answer_orders(
    answer: Callable[[dict[str, Any], bytes], Iterable[Message]], memory_bytes: int | None = None
) -> None:
    """Answer the orders of the starter until it closes the pipe; output of libraries goes to standard error.

    Args:
        answer: Takes an order and its content; each message that it yields is sent.
        memory_bytes: Limit of further memory, beyond the process's present use.
    """
    with os.fdopen(os.dup(1), "wb") as answers:
        # what a library prints is no answer
        os.dup2(2, 1)
        if memory_bytes is not None:
            bound_memory(memory_bytes)
        while header := sys.stdin.buffer.readline():
            order, size = json.loads(header)
            for message, content in answer(order, sys.stdin.buffer.read(size)):
                answers.write(_frame(message, content))
            answers.flush()


def _frame(message: Mapping[str, Any], content: bytes) -> bytes:
    return json.dumps([message, len(content)]).encode() + b"\n" + content


def write_stacks_on_request() -> None:
    """Have this process write the stacks of all threads to standard error at `STACK_SIGNAL`, and at a fatal signal."""
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, 2)


def request_stacks(pid: int, log: Path) -> None:
    """Have a child write its stacks to its log, and wait a moment for them; one that stands still writes none.

    One that takes no such request is ended by it: ask only a process that is to be killed.
    """
    with contextlib.suppress(OSError):
        first_size = last_size = log.stat().st_size
        deadline = time.monotonic() + _SECONDS_FOR_STACKS
        os.kill(pid, STACK_SIGNAL)
        while time.monotonic() < deadline and psutil.pid_exists(pid):
            time.sleep(0.02)
            size = log.stat().st_size
            # stacks are written frame by frame: they are whole when the log has stopped to grow
            if first_size < size == last_size:
                break
            last_size = size


def last_lines(log: Path, num_lines: int = 1, otherwise: str = "(no output)") -> str:
    """The last lines of a log in one, for an error message; `otherwise` where there are none."""
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return " | ".join(text.splitlines()[-num_lines:]) or otherwise


def bound_memory(more_bytes: int) -> None:
    """Let this process take so many bytes more than it has, and leave no core file behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        bound = psutil.Process().memory_info().vms + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    # a parent that ended while this process was still starting is found by its number
    parent = os.environ.get(PARENT, str(os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:
        os.write(2, b"the process that started this one has ended\n")
        os._exit(1)
