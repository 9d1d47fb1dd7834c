"""The roles of a project at the entry of every command: who lacks the role of its row is refused before it begins."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.access_gate import AccessGate, enter_gate
from phalanx.cli.answers.tree import leaf_commands
from phalanx.closing import Closeable

FILES = ("roles.json", "access.jsonl")
"""Of a project with roles; where no place of a command lies below one, nothing is imported and nobody is asked."""


def guard_commands(root: Any) -> None:
    """Put the gate before each command of a tree."""
    for names, command in leaf_commands(root):
        command.callback = _guard_command(" ".join(names), command.callback)


def _guard_command(name: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def run_guarded(*args: Any, **values: Any) -> Any:
        with _enter_gate(name, values):
            return callback(*args, **values)

    return run_guarded


@contextlib.contextmanager
def _enter_gate(name: str, values: dict[str, Any]) -> Iterator[None]:
    places = [Path.cwd(), *(place for value in values.values() for place in _places_in(value))]
    if any(_has_roles(place) for place in places):
        from phalanx.policy.gate import RoleGate, find_projects

        # who signs with a key acts as the person who has it
        reference = values.get("key") if name.startswith(("roles ", "policy ")) else None
        with RoleGate(name, find_projects(places), reference) as gate, enter_gate(gate):
            yield
    else:
        with LateGate(name) as late, enter_gate(late):
            yield


def _places_in(value: Any) -> Iterator[Path]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _places_in(item)
    elif isinstance(value, Path) or (isinstance(value, str) and len(value) < 4096 and "\0" not in value):
        yield Path(value)


def _has_roles(place: Path) -> bool:
    try:
        folder = Path(os.path.realpath(place))
        return any((parent / file).is_file() for parent in (folder, *folder.parents) for file in FILES)
    except (OSError, RuntimeError):
        return False


class LateGate(Closeable):
    """The gate of a command whose own places have no roles: a dataset that a run file names may have."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._stack = contextlib.ExitStack()
        self._gate: AccessGate | None = None

    def note_read(self, kind: str, digest: str | Callable[[], str], where: Path, *, is_sealed: bool) -> None:
        """Ask the roles that govern the place, where there are any."""
        if _has_roles(where):
            self._open_gate().note_read(kind, digest, where, is_sealed=is_sealed)

    def require_approvals(self, action: str, target: Callable[[], str], where: Path) -> None:
        """As `note_read`."""
        if _has_roles(where):
            self._open_gate().require_approvals(action, target, where)

    def check_caller(self, call: str, name: str, key: str | None) -> None:
        """Ask nobody: the command has no project."""

    def close(self) -> None:
        """Let go of the key."""
        self._stack.close()

    def _open_gate(self) -> AccessGate:
        # one for the command: it adds the projects of each place that it is asked about, and notes a read once
        if self._gate is None:
            from phalanx.policy.gate import RoleGate

            self._gate = self._stack.enter_context(RoleGate(self._command, ()))
        return self._gate
