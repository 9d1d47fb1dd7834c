"""The rounds that a client has entered: each is written down before the client says anything in it."""

from pathlib import Path
from typing import Protocol

from phalanx.errors import AggregationError
from phalanx.security.aggregate.messages import SumRefusal
from phalanx.security.crypto import digest_hex, lock_file, read_number, write_number


class EnteredRounds(Protocol):
    """The rounds that one client has entered, which outlive its process."""

    def enter_round(self, run: str, number: int) -> None:
        """Write down that the client enters a round.

        Raises:
            AggregationError: It has entered this round, or a later one.
        """


class RoundFile:
    """The rounds of one client in a directory of its own, a file a run.

    Guarantees:
        Through crashes and restarts no round is entered twice, by any process that uses the directory. An older
        directory that is put back is not found out.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def enter_round(self, run: str, number: int) -> None:
        """As `EnteredRounds` says."""
        path = self._directory / f"round-{digest_hex(run.encode())[:32]}.json"
        with lock_file(path):
            last = read_number(path, "round") or 0
            if number <= last:
                raise AggregationError(
                    SumRefusal.REPEATED_ROUND, f"round {number}: {last} was entered; the server must begin a later one"
                )
            write_number(path, "round", number)
