"""The enclave process of this machine: ended by its id, never outliving its starter."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.child import PythonProcess
from phalanx.config import StrictModel, dump_toml
from phalanx.errors import PeerLostError

_LAST_LINES = 3
COMMAND = ("phalanx", "enclave", "local")


class LocalEnclave:
    """A child process; a context manager that ends it.

    Args:
        directory: Gets its file and its log.
        config: What it is started with.
        threads: Threads of tensor kernels.
        command: Module and arguments, without the file.
    """

    def __init__(
        self, directory: Path, config: StrictModel, threads: int = 1, command: Sequence[str] = COMMAND
    ) -> None:
        self._directory, self._config, self._threads, self._command = directory, config, threads, command
        self._process: PythonProcess | None = None

    def start(self) -> None:
        """Start it; its output goes to ``enclave.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "enclave.toml"
        path.write_text(dump_toml(self._config), encoding="utf-8")
        threads = {"OMP_NUM_THREADS": str(self._threads)}
        self._process = PythonProcess((*self._command, str(path)), threads, self._directory / "enclave.log", renew=True)

    @property
    def pid(self) -> int | None:
        """Its process id; None before it is started."""
        return None if self._process is None else self._process.pid

    def look(self) -> None:
        """Return while it runs.

        Raises:
            PeerLostError: It has ended.
        """
        if self._process is not None and self._process.poll() is not None:
            how, said = self._process.how_it_ended(), self._process.last_output(_LAST_LINES)
            raise PeerLostError(f"the enclave ended with {how}: {said}; go on with --resume")

    def close(self) -> None:
        """Give the enclave, which has been told to end, a moment; then kill it."""
        if self._process is not None:
            self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
