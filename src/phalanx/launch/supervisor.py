"""A supervisor keeps one worker process running, as far as the rules of membership allow."""

from collections.abc import Callable, Sequence
from typing import Protocol

import typer

from phalanx.pipeline import WorkerConfig

Configure = Callable[[str, str], WorkerConfig]
"""From a party's name and the owner's address to its worker file."""
_BUG = 1


class WorkerHost(Protocol):
    """A host that runs one worker process."""

    def start(self, name: str, config: WorkerConfig) -> None:
        """Start a worker; the one that ran before is killed."""
        ...

    def poll(self, name: str) -> int | None:
        """Exit code of the worker of this name, None while it runs, negative when it died."""
        ...


class Substitutes:
    """Names for substitutes of dead workers: each is used once in a session of the owner."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._left = list(names)

    def take(self) -> str | None:
        """The next name, or None when all are used."""
        return self._left.pop(0) if self._left else None

    def refill(self) -> None:
        """Make all names free again, for another session."""
        self._left = list(self._names)


class Supervisor:
    """A supervisor starts a worker for each session of the owner, and a substitute for one that died.

    A party that was lost or convicted may not come back under its name in the same session, and a worker that ended by
    itself may have been convicted: only for one that died as a process does a substitute come, under another name.

    Attributes:
        name: The party that runs here now; None when none does.
        code: Exit code of the worker that ended here last.
    """

    def __init__(self, name: str, substitutes: Substitutes, host: WorkerHost, configure: Configure) -> None:
        self.name: str | None = None
        self.code: int | None = None
        self._first = name
        self._substitutes = substitutes
        self._host = host
        self._configure = configure
        self._owner: str | None = None

    def tend(self, owner: str | None) -> None:
        """Check the worker once; `owner` is where the owner listens, None while it does not."""
        if owner != self._owner:
            self._owner, self.name = owner, None
            if owner is not None:
                self._man(self._first, owner)
        if self.name is None or owner is None:
            return
        code = self._host.poll(self.name)
        if code is None:
            return
        gone, self.name, self.code = self.name, None, code
        if code < 0 or code == _BUG:
            self._replace(gone, owner)
        elif code > 0:
            typer.echo(f"launch: {gone} ended with exit code {code}; the run goes on without it", err=True)

    def _replace(self, gone: str, owner: str) -> None:
        name = self._substitutes.take()
        if name is None:
            typer.echo(f"launch: {gone} died and nobody may take its place; see pipeline.may_join", err=True)
            return
        typer.echo(f"launch: {gone} died, {name} takes its place", err=True)
        self._man(name, owner)

    def _man(self, name: str, owner: str) -> None:
        self.name = name
        self._host.start(name, self._configure(name, owner))
