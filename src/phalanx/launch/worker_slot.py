"""A place for one worker process; an engine decides on which machine it is."""

import tempfile
from pathlib import Path

from phalanx.config import dump_toml
from phalanx.launch.child import LOST, Child
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
        self._child.start(("worker", str(path)), {"OMP_NUM_THREADS": str(config.threads)})
        self._name = name

    def poll(self, name: str) -> int | None:
        """Exit code of the worker of this name, None while it runs, `LOST` when this place knows nothing of it."""
        return self._child.poll() if name == self._name else LOST

    def ask_to_leave(self) -> None:
        """Let the worker hand over what it holds and end."""
        self._child.ask_to_end()

    def end(self) -> None:
        """Give the worker a moment to end by itself, then kill it."""
        self._child.end()

    def kill(self) -> None:
        """End the worker at once."""
        self._child.kill()

    def machine(self) -> str | None:
        """What the engine calls this machine; None for what it calls itself."""
        return None
