"""The other tool, in a process and an environment of its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.errors import DataError

PEER_VARIABLE = "PHALANX_PEER_PYTHON"
"""Names the Python of an environment with datatrove; unset, the peer's figures are null."""


class FilterPeer(Closeable):
    """A process that judges the same texts by datatrove's filters."""

    def __init__(self, python: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [python, str(Path(__file__).with_name("peer_filters.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
                encoding="utf-8",
            )
        except OSError as exc:
            raise DataError(f"bench data: {PEER_VARIABLE}={python} cannot be started: {exc}") from exc
        self.name = f"datatrove {self._answer()['version']}"

    def judge(self, texts: list[str], *, chain: bool) -> dict[str, Any]:
        """Verdicts and CPU seconds of each filter alone, and where asked for of all of them in a chain.

        Raises:
            DataError: The process has ended.
        """
        stdin = self._process.stdin
        if stdin is None:
            raise DataError("bench data: the peer has no input")
        try:
            stdin.write(json.dumps({"texts": texts, "chain": chain}) + "\n")
            stdin.flush()
        except OSError as exc:
            raise DataError("bench data: the peer has ended; run its Python with datatrove by hand") from exc
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        reply = self._process.stdout.readline() if self._process.stdout else ""
        if not reply:
            self.close()
            raise DataError(f"bench data: the peer has ended; does the Python of {PEER_VARIABLE} have datatrove?")
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def peer_python() -> str | None:
    """The interpreter that the environment names."""
    return os.environ.get(PEER_VARIABLE) or None
