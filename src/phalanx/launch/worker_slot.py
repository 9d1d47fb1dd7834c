"""Worker processes under supervision: a place for each, its restarts, and the watch over the owner's process."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import typer

from phalanx.config import dump_toml
from phalanx.launch.child import LOST, Child, exit_code
from phalanx.launch.owner import is_worth_another
from phalanx.launch.request import reachable_host
from phalanx.pipeline import WorkerConfig


class LocalWorkerHost:
    """A host that runs ``phalanx worker`` under one name after the other; keys are read here and sent nowhere."""

    def __init__(self) -> None:
        self._child = Child()
        self._name: str | None = None
        # a directory that no other user can enter; a worker file holds no secret, but says where one is
        self._directory = tempfile.TemporaryDirectory(prefix="phalanx-worker-")

    def start(self, name: str, config: WorkerConfig) -> None:
        """Start a worker; whichever ran here before is killed."""
        if config.advertise is None:
            config = config.model_copy(update={"advertise": reachable_host(config.transport.bind, self.machine())})
        path = Path(self._directory.name) / f"{name}.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        self._child.start_command(("worker", str(path)), {"OMP_NUM_THREADS": str(config.threads)})
        self._name = name

    def poll(self, name: str) -> int | None:
        """Exit code of the worker of this name, None while it runs, `LOST` when this place knows nothing of it."""
        return self._child.poll() if name == self._name else LOST

    def ask_to_leave(self) -> None:
        """Let the worker hand over its state and end."""
        self._child.ask_to_end()

    def end(self) -> None:
        """Give the worker a moment to end by itself, then kill it."""
        self._child.end_process()

    def kill(self) -> None:
        """End the worker at once."""
        self._child.kill()

    def machine(self) -> str | None:
        """Return the engine's name for this machine; None for its own."""
        return None


Configure = Callable[[str, str], WorkerConfig]
"""From a party's name and the owner's address to its worker file."""
_BUG = 1


class WorkerHost(Protocol):
    """A host that runs one worker process."""

    def start(self, name: str, config: WorkerConfig) -> None:
        """Start a worker; an earlier one is killed."""

    def poll(self, name: str) -> int | None:
        """Exit code of the worker of this name, None while it runs, negative when it died."""


class Substitutes:
    """Names for substitutes of dead workers: each is used once in a session of the owner."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._left = list(names)

    def next_name(self) -> str | None:
        """The next name, or None when all are used."""
        return self._left.pop(0) if self._left else None

    def refill_names(self) -> None:
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

    def check_worker(self, owner: str | None) -> None:
        """Check the worker once; `owner` is where the owner listens, None while it does not."""
        if owner != self._owner:
            self._owner, self.name = owner, None
            if owner is not None:
                self._start_worker(self._first, owner)
        if self.name is None or owner is None:
            return
        code = self._host.poll(self.name)
        if code is None:
            return
        gone, self.name, self.code = self.name, None, code
        if code < 0 or code == _BUG:
            self._replace_worker(gone, owner)
        elif code > 0:
            typer.echo(f"launch: {gone} ended with exit code {code}; the run continues without it", err=True)

    def _replace_worker(self, gone: str, owner: str) -> None:
        name = self._substitutes.next_name()
        if name is None:
            typer.echo(f"launch: {gone} died and no other party may replace it; see pipeline.may_join", err=True)
            return
        typer.echo(f"launch: {gone} died; {name} replaces it", err=True)
        self._start_worker(name, owner)

    def _start_worker(self, name: str, owner: str) -> None:
        self.name = name
        self._host.start(name, self._configure(name, owner))


LOOK_EVERY_S = 0.1


class WatchedProcess(Protocol):
    """The interface to an owner's process."""

    @property
    def listen_address(self) -> str | None:
        """``host:port`` where it listens, once it does."""

    def start_process(self) -> None:
        """Start it, or start it again."""

    def poll(self) -> int | None:
        """Exit code; None while it runs, negative for a signal."""

    def ask_to_end(self) -> None:
        """Let it stop in good order."""

    def kill(self) -> None:
        """End it at once."""


class EndNotice(Protocol):
    """The notice to end that the watching process itself may get."""

    @property
    def notice_count(self) -> int:
        """How often."""


def watch_owner(
    owner: WatchedProcess,
    notice: EndNotice,
    look: Callable[[str | None], None],
    *,
    restarts: int = 0,
    renew: Callable[[], None] = lambda: None,
    name: str = "the owner",
) -> int:
    """Start an owner and watch it; the first notice asks it to end, the second one kills it.

    Args:
        notice: Looked at each time; after one nothing is started again.
        look: Called several times a second with where the owner listens, None while it does not.
        restarts: Maximum of restarts after ends that may not recur.
        renew: Called after each further start.

    Returns:
        How it ended at last, negative for a signal.
    """
    owner.start_process()
    was_told = False
    while True:
        code = owner.poll()
        if code is not None and (notice.notice_count or restarts == 0 or not is_worth_another(code)):
            return code
        if code is not None:
            restarts -= 1
            typer.echo(f"launch: {name} ended with exit code {exit_code(code)} and restarts", err=True)
            owner.start_process()
            renew()
        look(owner.listen_address)
        if notice.notice_count and not was_told:
            owner.ask_to_end()
            was_told = True
        if notice.notice_count > 1:
            owner.kill()
        time.sleep(LOOK_EVERY_S)
