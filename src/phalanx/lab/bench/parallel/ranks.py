"""The bench's side of ranks: one process, in which torch was imported once, becomes all ranks of all arms."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import LineProcess

Answer = dict[str, Any]


class RankForkServer(LineProcess):
    """The process that ranks are forked from; a context manager that ends it and with it all of them.

    Args:
        preload: Modules that it imports before any rank is made, so that these need not.
    """

    def __init__(self, directory: Path, preload: tuple[str, ...] = ()) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory.resolve()
        self._num_crews = 0
        command = ("phalanx.lab.bench.parallel.rank_host", *preload)
        super().__init__("the process of all ranks", command, {"OMP_NUM_THREADS": "1"}, directory / "ranks.log")

    def make_crew(self, name: str, task: str, world: int, body: Mapping[str, Any] | None = None) -> "ArmRanks":
        """Make ranks that do one task together."""
        number = self._num_crews
        self._num_crews += 1
        directory = self._directory / f"crew-{number}"
        directory.mkdir(mode=0o700)
        spec = {"task": task, "world": world, "directory": str(directory), "body": dict(body or {})}
        crew = ArmRanks(self, number, name)
        self.exchange_messages(name, crew=number, start=spec)
        return crew

    def exchange_messages(self, name: str, **message: Any) -> list[Answer]:
        """Send a message and wait for the answers of the crew that it concerns."""
        self.send_text(json.dumps(message))
        answers: list[Answer] = json.loads(self.read_text())
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise TrainingError(f"bench: {name}, rank {rank}: {answer['error']}")
        return answers


class ArmRanks(Closeable):
    """Ranks of one arm, idle between orders; a context manager that ends them."""

    def __init__(self, host: RankForkServer, number: int, name: str) -> None:
        self.name = name
        self._host = host
        self._number = number

    def ask_all(self, **order: Any) -> list[Answer]:
        """Let all ranks carry one order out."""
        return self._host.exchange_messages(self.name, crew=self._number, order=order)

    def close(self) -> None:
        # after an error the host may be gone, and its ranks with it
        with contextlib.suppress(TrainingError):
            self._host.exchange_messages(self.name, crew=self._number, end=True)
