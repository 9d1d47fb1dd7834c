"""Local worker processes on a leash: ended by id, never outliving the trusted side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from phalanx.child import PythonProcess
from phalanx.config import dump_toml
from phalanx.split.masked.config import MaskedWorkerConfig
from phalanx.transport import TransportConfig

_COMMAND = ("phalanx", "masked-worker")


class LocalMaskedWorkers:
    """Child processes by worker name; a context manager that ends them all.

    They run as the trusted side's user, so they can read that side's memory: for one machine with an enclave
    and an accelerator in it, and for tests.

    Args:
        directory: Gets each worker's file and log.
        identities: Has a directory with certificate and keys for each name.
        transport: Deadlines and bounds; workers let the system choose their ports.
        device: What they multiply on.
        threads: Threads of each.
        command: Module and arguments of a worker, without its file; another than the default is for drills only.
    """

    def __init__(
        self,
        directory: Path,
        identities: Path,
        transport: TransportConfig,
        device: str = "cpu",
        threads: int = 1,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._directory, self._identities, self._device = directory, identities, device
        self._transport = transport.model_copy(update={"port": 0})
        self._threads, self._command = threads, command
        self._processes: dict[str, PythonProcess] = {}

    def start(self, names: Sequence[str], owner: str, owner_name: str) -> None:
        """Start one process for each name; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            config = MaskedWorkerConfig(
                identity=str((self._identities / name).resolve()),
                owner=owner,
                owner_name=owner_name,
                device=self._device,
                transport=self._transport,
            )
            path = self._directory / f"{name}.toml"
            path.write_text(dump_toml(config), encoding="utf-8")
            threads = {"OMP_NUM_THREADS": str(self._threads)}
            self._processes[name] = PythonProcess((*self._command, str(path)), threads, self._directory / f"{name}.log")

    def is_alive(self, name: str) -> bool:
        """Whether a worker still runs."""
        return self._processes[name].poll() is None

    def pid(self, name: str) -> int:
        """The process of a worker."""
        return self._processes[name].pid

    def last_output(self, name: str) -> str:
        """Return the last line of a worker's log, for an error message."""
        return self._processes[name].last_output()

    def close(self) -> None:
        """Give the workers, which have been told to end, a moment; then kill them."""
        for process in self._processes.values():
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
