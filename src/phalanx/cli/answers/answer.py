"""The answer of a command: people are told it in words while it is found, programs get it as one JSON object (ADR 97).

Under ``--json`` stdout takes JSON alone. Whatever a command, a library or a child process prints goes to stderr.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from phalanx.errors import PhalanxError

OPTION = "--json"


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        facts: One JSON object; a path becomes text, a number that is not finite becomes null.
        error: Why the command fails although it has an answer; its exit code counts then.
    """

    facts: Mapping[str, Any]
    exit_code: int = 0
    error: PhalanxError | None = None


_STDOUT: dict[int, TextIO] = {}
"""Where stdout is, by the process that was asked; a worker that is forked meanwhile was not."""


def _answer_stream() -> TextIO | None:
    return _STDOUT.get(os.getpid())


def for_programs() -> bool:
    """Whether the command that runs was asked for JSON."""
    return _answer_stream() is not None


def print_object(value: Mapping[str, Any]) -> None:
    """Print one JSON object as a line on stdout; for people, and in a forked process, print nothing."""
    lines = _answer_stream()
    if lines is not None:
        lines.write(json.dumps(_strict_json(value), allow_nan=False) + "\n")
        lines.flush()


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Within it stdout is kept for `print_object`; all other output goes to stderr, that of child processes too."""
    with _keep_stdout() as lines, contextlib.redirect_stdout(sys.stderr):
        _STDOUT[os.getpid()] = lines
        try:
            yield
        finally:
            del _STDOUT[os.getpid()]


@contextlib.contextmanager
def _keep_stdout() -> Iterator[TextIO]:
    """Yield a stream to where stdout went; file descriptor 1 is stderr meanwhile."""
    if not _is_descriptor_1():
        # a test, or a notebook, has put another stream there, to which nothing but Python writes
        yield sys.stdout
        return
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(stdout_copy), "w", encoding="utf-8") as lines:
            yield lines
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _is_descriptor_1() -> bool:
    try:
        return os.path.sameopenfile(1, sys.stdout.fileno())
    except OSError:
        return False


def _strict_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
