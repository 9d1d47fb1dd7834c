"""Processes that read what foreign libraries may choke on: bounded, reused, replaced where one ended."""

import atexit
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.child import AskedProcess, Message
from phalanx.errors import DataError


class ReaderProcess(AskedProcess):
    """One process that reads foreign bytes."""

    def __init__(self, module: str, task: str = "") -> None:
        self.module, self.task = module, task
        # other allocators of pyarrow reserve more than the bound before they give any
        super().__init__([module], {"ARROW_DEFAULT_MEMORY_POOL": "system"}, Path(os.devnull))

    @staticmethod
    def take_idle(module: str, task: str = "") -> "ReaderProcess":
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

    def read(self, order: dict[str, Any], content: bytes = b"") -> Iterator[Message]:
        """Yield its answers until the last one.

        Raises:
            DataError: It reports an error; or it has ended, which `exit_code` then tells.
        """
        try:
            for answer, answer_content in self.ask_all(order, content):
                if "error" in answer:
                    raise DataError(answer["error"])
                yield answer, answer_content
        except EOFError as exc:
            raise DataError(
                "cannot be decoded (it asked for too much memory, or ended the process that reads it)"
            ) from exc


_IDLE: list[ReaderProcess] = []
"""Readers of this process between two orders."""


@atexit.register
def end_idle_readers() -> None:
    """End the readers that are between two orders."""
    while _IDLE:
        reader = _IDLE.pop()
        if reader.is_of_this_process:
            reader.close()
