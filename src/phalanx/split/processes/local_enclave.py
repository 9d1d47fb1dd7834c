"""The enclave process of this machine: ended by its id, never outliving its starter."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.config import StrictModel, dump_toml
from phalanx.errors import PeerLostError

_SECONDS_TO_END = 5.0
_LAST_LINES = 3
COMMAND = ("phalanx", "enclave", "serve")


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
        self._log = directory / "enclave.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output goes to ``enclave.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "enclave.toml"
        path.write_text(dump_toml(self._config), encoding="utf-8")
        settings = {"OMP_NUM_THREADS": str(self._threads), "PHALANX_PARENT": str(os.getpid())}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
                [sys.executable, "-m", *self._command, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal is for its starter
                process_group=0,
                env={**os.environ, **settings},
            )

    @property
    def pid(self) -> int | None:
        """Its process id; None before it is started."""
        return None if self._process is None else self._process.pid

    def look(self) -> None:
        """Return while it runs.

        Raises:
            PeerLostError: It has ended.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise PeerLostError(f"the enclave ended with {how}: {self._last_output()}; go on with --resume")

    def close(self) -> None:
        """Give the enclave, which has been told to end, a moment; then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(_SECONDS_TO_END)

    def _last_output(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-_LAST_LINES:]) or "(no output)"
