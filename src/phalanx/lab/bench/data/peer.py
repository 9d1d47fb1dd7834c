"""The other tools of the bench: each in a process and an environment of its own, whose Python a variable names."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.errors import DataError, TrainingError
from phalanx.lab.bench.measure.harness import start_peer

PEER_VARIABLE = "PHALANX_PEER_PYTHON"
"""Names the Python of an environment with datatrove; unset, the peer's figures are null."""


class PeerProgram(Closeable):
    """A program of this folder that answers JSON lines with JSON lines.

    Args:
        program: Name of a file in this folder that the peer's Python runs.
        needs: Packages of that Python, which the error message names.
    """

    def __init__(self, python: str, program: str, needs: str) -> None:
        self._cause = f"bench data: the peer {program} did not run; does the Python of {PEER_VARIABLE} have {needs}?"
        self._log = tempfile.TemporaryDirectory(prefix="phalanx-bench-")
        log, path = Path(self._log.name) / "log", Path(__file__).with_name(program)
        try:
            self._process = start_peer(
                program, python, (str(path),), {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, log
            )
        except OSError as exc:
            self._log.cleanup()
            raise DataError(f"bench data: {PEER_VARIABLE}={python} did not run: {exc}") from exc

    def receive(self) -> Any:
        """Wait for its next answer."""
        try:
            return json.loads(self._process.read_text())
        except TrainingError as exc:
            self.close()
            raise DataError(f"{self._cause} {exc}") from exc

    def ask(self, question: object) -> Any:
        """Ask and wait for the answer."""
        try:
            self._process.send_text(json.dumps(question))
        except TrainingError as exc:
            self.close()
            raise DataError(f"{self._cause} {exc}") from exc
        return self.receive()

    def close(self) -> None:
        self._process.close()
        self._log.cleanup()


class FilterPeer(PeerProgram):
    """A process that judges the same texts by datatrove's filters."""

    def __init__(self, python: str) -> None:
        super().__init__(python, "peer_filters.py", "datatrove")
        self.name = f"datatrove {self.receive()['version']}"

    def judge_texts(self, texts: list[str], *, chain: bool) -> dict[str, Any]:
        """Verdicts and CPU seconds of each filter alone, and where asked for of all of them in a chain."""
        answer: dict[str, Any] = self.ask({"texts": texts, "chain": chain})
        return answer


def peer_python() -> str | None:
    """The interpreter that the environment names."""
    return os.environ.get(PEER_VARIABLE) or None
