"""The enclave process of this machine: ended by its id, never outliving its starter."""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.config import dump_toml
from phalanx.errors import PeerLostError
from phalanx.split.processes.enclave_file import EnclaveConfig

_SECONDS_TO_END = 5.0
_LAST_LINES = 3
COMMAND = ("phalanx", "enclave", "serve")


class LocalEnclave:
    """A child process; a context manager that ends it.

    Args:
        directory: Gets its file and its log.
        config: What it is started with.
    """

    def __init__(self, directory: Path, config: EnclaveConfig) -> None:
        self._directory, self._config = directory, config
        self._log = directory / "enclave.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output goes to ``enclave.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "enclave.toml"
        path.write_text(dump_toml(self._config), encoding="utf-8")
        settings = {"OMP_NUM_THREADS": str(self._config.threads), "PHALANX_PARENT": str(os.getpid())}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
                [sys.executable, "-m", *COMMAND, str(path)],
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
