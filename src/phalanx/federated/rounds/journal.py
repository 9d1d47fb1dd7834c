"""The journal of rounds: what has been asked and admitted is on the disk before it counts."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.crypto import digest_hex

_LINES = "rounds.jsonl"


@dataclass
class RecalledRounds:
    """What a journal says to a session that goes on after so many finished rounds.

    Attributes:
        models: Digest of the weights that went out, by round.
        headers: Signed headers of all updates that have counted.
        open: Header and values of the updates of the round that was under way, by site.
        counted: The last round in which a site's update has counted.
        excluded: Sites that are shut out, with reasons.
        last_sum: Number of the last secure sum that was begun, in whatever session.
    """

    models: dict[int, str] = field(default_factory=dict)
    headers: list[bytes] = field(default_factory=list)
    open: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    last_sum: int = 0


class RoundJournal:
    """Lines in a file of the run directory, and the values of the updates of the round under way.

    Args:
        directory: Its own.

    Guarantees:
        What a call has noted is on the disk when the call returns. A line that a crash has cut is as if it had not been
        begun. The number of a sum is never given twice.
    """

    def __init__(self, directory: Path) -> None:
        self._path, self._values = directory / _LINES, directory / "updates"
        self._values.mkdir(parents=True, exist_ok=True)
        self._next_sum = 1 + max((line["sum"] for line in self._lines() if "sum" in line), default=0)

    def opened(self, number: int, model: str) -> None:
        """A round begins with these weights."""
        for path in self._values.iterdir():
            path.unlink()
        self._append({"round": number, "model": model})

    def admitted(self, number: int, site: str, header: bytes, values: bytes) -> None:
        """An update is let into a round."""
        path = self._values / site
        path.write_bytes(values)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._append({"round": number, "site": site, "header": header.decode("ascii"), "values": digest_hex(values)})

    def next_sum(self) -> int:
        """Return a number for a secure sum that none had before."""
        number = self._next_sum
        self._append({"sum": number})
        self._next_sum += 1
        return number

    def excluded(self, site: str, reason: str) -> None:
        """A site is shut out."""
        self._append({"excluded": site, "reason": reason})

    def closed(self, number: int, sites: dict[str, int]) -> None:
        """A round is over; `sites` have counted, each with the round that its update was trained in."""
        self._append({"closed": number, "sites": sites})

    def recall(self, finished: int) -> RecalledRounds:
        """Return what holds after so many finished rounds, whatever was done after them and is lost."""
        found = RecalledRounds(last_sum=self._next_sum - 1)
        for line in self._lines():
            if "excluded" in line:
                found.excluded[line["excluded"]] = line["reason"]
            elif "closed" in line and line["closed"] <= finished:
                found.counted |= line["sites"]
            elif "site" in line:
                self._recall_update(line, finished, found)
            elif "model" in line and line["round"] <= finished + 1:
                found.models[line["round"]] = line["model"]
                found.open = {}
        return found

    def _recall_update(self, line: dict[str, Any], finished: int, found: RecalledRounds) -> None:
        header = line["header"].encode("ascii")
        if line["round"] <= finished:
            found.headers.append(header)
        elif line["round"] == finished + 1:
            with contextlib.suppress(OSError):
                values = (self._values / line["site"]).read_bytes()
                if digest_hex(values) == line["values"]:
                    found.open[line["site"]] = (header, values)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(canonical_json(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            said = f"{self._path}: cannot be written ({exc.strerror}); free space, then --resume"
            raise CheckpointError(said) from exc

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        whole, _, cut = self._path.read_bytes().rpartition(b"\n")
        if cut:
            # a crash in the middle of a line: nobody was told that it is there
            self._path.write_bytes(whole + b"\n" if whole else b"")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                yield json.loads(line)
            except ValueError as exc:
                raise CheckpointError(f"{self._path}, line {number}: is no JSON; put back what the run wrote") from exc
