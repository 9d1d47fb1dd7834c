"""Processes that read what foreign libraries may choke on: bounded, asked over pipes, replaced where one ended.

An order is a line of JSON and as many bytes as it says under ``bytes``; so is an answer. The last answer to an order
has ``end``, or ``error``.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

from phalanx.child import PARENT
from phalanx.errors import DataError

_MAX_LINE_BYTES = 1 << 24
_ENDING_S = 5.0
Answer = tuple[dict[str, Any], bytes]


class ReaderProcess:
    """One process, and the pipes to it.

    Args:
        module: Module of the process; orders and answers are of the form above.
        task: Task of the process; an idle one is reused for the same task only.
    """

    def __init__(self, module: str, task: str = "") -> None:
        self.module, self.task = module, task
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
            # other allocators of pyarrow reserve more than the bound before they give any
            env={**os.environ, PARENT: str(os.getpid()), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        self._of_process = os.getpid()

    @staticmethod
    def take(module: str, task: str = "") -> "ReaderProcess":
        """Return an idle process of the module, or start one, which takes half a second."""
        for reader in [idle for idle in _IDLE if (idle.module, idle.task) == (module, task)]:
            _IDLE.remove(reader)
            # a process that was forked has its starter's pipes, and must not write into them
            if reader.is_of_this_process and reader.exit_code is None:
                return reader
        return ReaderProcess(module, task)

    def give_back(self) -> None:
        """Keep it for the next order of its task."""
        _IDLE.append(self)

    def ask(self, order: dict[str, Any], content: bytes = b"") -> Iterator[Answer]:
        """Yield its answers until the last one.

        Raises:
            DataError: It reports an error; or it has ended, which `exit_code` then tells.
        """
        with contextlib.suppress(BrokenPipeError):
            pipe = self._pipe("stdin")
            pipe.write(json.dumps({**order, "bytes": len(content)}).encode() + b"\n")
            pipe.write(content)
            pipe.flush()
        while True:
            header = self._pipe("stdout").readline(_MAX_LINE_BYTES)
            answer: dict[str, Any] = json.loads(header) if header.endswith(b"\n") else {}
            answer_bytes = self._pipe("stdout").read(answer["bytes"]) if answer else b""
            if not answer or len(answer_bytes) < answer["bytes"]:
                # a process that is ending closes its pipes a moment before its exit code is there
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ENDING_S)
                self.end()
                raise DataError("cannot be decoded (it asked for too much memory, or ended the process that reads it)")
            if "error" in answer:
                raise DataError(answer["error"])
            yield answer, answer_bytes
            if answer["end"]:
                return

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it can be asked."""
        return self._process.poll()

    @property
    def is_of_this_process(self) -> bool:
        """Whether it was started here, and not by the process that this one was forked from."""
        return self._of_process == os.getpid()

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] | None = getattr(self._process, name)
        if pipe is None:
            raise DataError(f"{self.module}: its process has no pipe")
        return pipe


_IDLE: list[ReaderProcess] = []
"""Readers of this process between two orders."""


@atexit.register
def end_idle_readers() -> None:
    """End the readers that are between two orders."""
    while _IDLE:
        reader = _IDLE.pop()
        if reader.is_of_this_process:
            reader.end()
