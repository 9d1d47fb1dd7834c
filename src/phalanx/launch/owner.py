"""The owner's process: begins the run or goes on with it, and says where it listens."""

from pathlib import Path

from phalanx.launch.child import Child
from phalanx.launch.request import Launch, reachable_host
from phalanx.train import ADDRESS_FILE, holds_run

_A_BUG, _A_LOST_PEER = 1, 4


def is_worth_another(code: int) -> bool:
    """Whether an owner that ended so may end otherwise next time; a wrong run file or a broken log will not."""
    return code < 0 or code in (_A_BUG, _A_LOST_PEER)


class OwnerProcess(Child):
    """The process of ``phalanx train``; started again, it goes on from the last checkpoint."""

    def __init__(self, launch: Launch, machine: str | None = None) -> None:
        """`machine` is the engine's name for this machine; its own name when None."""
        super().__init__()
        self._launch = launch
        self._machine = machine

    def start_process(self) -> None:
        """Start it; an address that an earlier one left behind is forgotten first."""
        self._address_file.unlink(missing_ok=True)
        self.start_command(("train", *self.owner_arguments()), {})

    def owner_arguments(self) -> tuple[str, ...]:
        """The command line of ``phalanx train``, after the verb."""
        launch = self._launch
        overrides = (word for override in launch.settled_overrides for word in ("--set", override))
        resume = ("--resume",) if holds_run(launch.run_dir) else ()
        return (str(launch.run_file), *overrides, "--run-dir", str(launch.run_dir), *resume)

    @property
    def listen_address(self) -> str | None:
        """``host:port`` where it listens, once it does."""
        try:
            address = self._address_file.read_text(encoding="ascii").strip()
        except OSError:
            return None
        bind, _, port = address.rpartition(":")
        return f"{self._launch.advertise or reachable_host(bind, self._machine) or bind}:{port}"

    @property
    def _address_file(self) -> Path:
        return self._launch.run_dir / ADDRESS_FILE
