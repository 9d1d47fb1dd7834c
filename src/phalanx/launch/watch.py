"""The watch over an owner's process until it has ended for good, on whichever engine it runs."""

import time
from collections.abc import Callable
from typing import Protocol

import typer

from phalanx.launch.child import exit_code
from phalanx.launch.owner import is_worth_another

LOOK_EVERY_S = 0.1


class WatchedProcess(Protocol):
    """The interface to an owner's process."""

    @property
    def address(self) -> str | None:
        """``host:port`` where it listens, once it does."""
        ...

    def begin(self) -> None:
        """Start it, or start it again."""
        ...

    def poll(self) -> int | None:
        """Exit code; None while it runs, negative for a signal."""
        ...

    def ask_to_end(self) -> None:
        """Let it stop in good order."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class EndNotice(Protocol):
    """The notice to end that the watching process itself may get."""

    @property
    def given(self) -> int:
        """How often."""
        ...


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
        owner: Process to start.
        notice: Looked at each time; after one nothing is started again.
        look: Called several times a second with where the owner listens, None while it does not.
        restarts: How often it is started again where it may end otherwise next time.
        renew: Called after each further start.
        name: What it is called in messages.

    Returns:
        How it ended at last, negative for a signal.
    """
    owner.begin()
    told = False
    while True:
        code = owner.poll()
        if code is not None and (notice.given or restarts == 0 or not is_worth_another(code)):
            return code
        if code is not None:
            restarts -= 1
            typer.echo(f"launch: {name} ended with exit code {exit_code(code)} and goes on", err=True)
            owner.begin()
            renew()
        look(owner.address)
        if notice.given and not told:
            owner.ask_to_end()
            told = True
        if notice.given > 1:
            owner.kill()
        time.sleep(LOOK_EVERY_S)
