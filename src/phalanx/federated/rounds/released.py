"""The log of a site: the one release of each of its updates.

An update is a site's result of one round from one set of weights. A round from the same weights later is another one,
so that a run goes on after a round that was lost.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.errors import AggregationError, RollbackError
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import digest_hex, in_domain


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a log with their numbers from 1; none of a file that does not exist.

    A line that a crash cut short is removed first: nothing was done for it.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    complete, _, cut = data.rpartition(b"\n")
    if cut:
        # in place: a crash or a full disk must not cost the lines before it
        os.truncate(path, len(data) - len(cut))
    yield from enumerate(complete.splitlines(), 1)


class ReleasedSums:
    """A log of one site, a line for each of its updates, by round and weights.

    Two sums of one update with different company differ by the others' updates, or by a single one.

    Guarantees:
        Through crashes and restarts a site releases its share of sums of one update for one set of members only. What
        a sum is released for is on the disk before. An older directory that is put back is not found out; nor are
        updates of different rounds from weights that differ by a little or not at all, of which only noise bounds what
        sums tell together.
    """

    def __init__(self, directory: Path) -> None:
        self._log = UpdateLog(directory / "released-sums.jsonl", "members")

    def note_release(self, model: str, number: int, members: tuple[str, ...]) -> None:
        """Write down that a sum is released."""
        digest = digest_hex(in_domain("released-members/1", canonical_json({"members": sorted(members)})))
        if not self._log.note_update(model, number, digest):
            raise AggregationError(
                SumRefusal.REPEATED_ROUND,
                f"round {number}: a sum of this update was released with other members; their difference would "
                "reveal single sites",
            )


class UpdateLog:
    """A log of one site, with one digest for each of its updates.

    Args:
        name: Key of the digest in a line.

    Guarantees:
        Through crashes and restarts an update has one digest only, which is on the disk before `note_update` returns.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._released = dict(self._read_sums())

    def note_update(self, model: str, number: int, digest: str) -> bool:
        """Write the digest of an update down; return whether it is the only one that the update has had."""
        update = (model, number)
        earlier = self._released.get(update)
        if earlier is not None:
            return earlier == digest
        try:
            with self._path.open("ab") as file:
                file.write(canonical_json({"model": model, "round": number, self._name: digest}) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            raise RollbackError(f"{self._path}: cannot be written ({exc.strerror}); nothing is released") from exc
        self._released[update] = digest
        return True

    def _read_sums(self) -> Iterator[tuple[tuple[str, int], str]]:
        for number, text in complete_lines(self._path):
            try:
                entry = json.loads(text)
                yield (str(entry["model"]), int(entry["round"])), str(entry[self._name])
            except (ValueError, KeyError, TypeError) as exc:
                raise RollbackError(
                    f"{self._path}, line {number}: is not a record of this log; the file is damaged"
                ) from exc
