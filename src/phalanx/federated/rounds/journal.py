"""The journal of rounds, on the disk before it counts, and the record of a round's outcome."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError, FailedRoundError, writing_cure
from phalanx.federated.rounds.released import complete_lines
from phalanx.security.crypto import digest_hex, steady_now

_LINES = "rounds.jsonl"
MAX_LOST_ROUNDS = 3
"""Rounds in a row that may be lost before the run ends."""
_UNLESS_NONE = ("epsilon", "rounds_left", "far_rounds")


@dataclass(frozen=True)
class ReleasedSum:
    """A sum of which the masks were about to be taken off.

    Attributes:
        cohort: The sites that it was begun with.
    """

    cohort: tuple[str, ...]
    members: tuple[str, ...]


@dataclass
class RecalledRounds:
    """A journal's contents for a session that goes on after so many finished rounds.

    Attributes:
        models: Digest of the weights that went out, by round.
        open: Header and values of the updates of the round that was under way, by site.
        counted: The last round in which a site's update has counted.
        excluded: Sites that are shut out, with reasons.
        refused: A site for each of its updates that was refused and shows its lie.
        spent: Epsilon of each site's private rows, the last that it has said, of rounds that are lost as well.
    """

    models: dict[int, str] = field(default_factory=dict)
    headers: list[bytes] = field(default_factory=list)
    open: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)


class RoundJournal:
    """Lines in a file of the run directory, and the values of the updates of the round under way.

    Guarantees:
        What a call has noted is on the disk when the call returns. A line that a crash has cut is as if it had not been
        begun. The number of a sum is never given twice, and begins
        with the clock: where a run file is run once more, in a new run directory, its sites have seen smaller ones.
    """

    def __init__(self, directory: Path) -> None:
        self._path, self._values = directory / _LINES, directory / "updates"
        self._values.mkdir(parents=True, exist_ok=True)
        now_ms = int(1000 * steady_now().timestamp())
        self._next_sum: int = max([now_ms, *(entry["sum"] + 1 for entry in self._read_entries() if "sum" in entry)])
        self._released: dict[tuple[int, str], list[ReleasedSum]] = {}
        for entry in self._read_entries():
            if "released" in entry:
                released = ReleasedSum(tuple(entry["cohort"]), tuple(entry["released"]))
                self._released.setdefault((entry["of"], entry["by"]), []).append(released)

    def note_opened(self, number: int, model: str) -> None:
        """A round begins with these weights."""
        for path in self._values.iterdir():
            path.unlink()
        self._append_entry({"round": number, "model": model})

    def note_admitted(self, number: int, site: str, header: bytes, values: bytes) -> None:
        """An update is let into a round."""
        path = self._values / site
        path.write_bytes(values)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._append_entry(
            {"round": number, "site": site, "header": header.decode("ascii"), "values": digest_hex(values)}
        )

    def next_sum(self) -> int:
        """Return a number for a secure sum that none had before."""
        number = self._next_sum
        self._append_entry({"sum": number})
        self._next_sum += 1
        return number

    def note_releasing(self, number: int, model: str, release: ReleasedSum) -> None:
        """The masks of a sum are about to be taken off."""
        sums = self._released.setdefault((number, model), [])
        if release not in sums:
            lists = {"cohort": list(release.cohort), "released": list(release.members)}
            self._append_entry({"of": number, "by": model, **lists})
            sums.append(release)

    def released_sums(self, number: int, model: str) -> tuple[ReleasedSum, ...]:
        """Return the sums that `note_releasing` has written for a round from these weights."""
        return tuple(self._released.get((number, model), ()))

    def note_excluded(self, site: str, reason: str) -> None:
        """A site is shut out."""
        self._append_entry({"excluded": site, "reason": reason})

    def note_refused(self, number: int, site: str, reason: str, header: bytes) -> None:
        """An update was refused; its signed header is the evidence against the site."""
        entry = {"refused": site, "in": number, "reason": reason, "header": header.decode("ascii")}
        self._append_entry(entry)

    def note_spent(self, site: str, epsilon: float) -> None:
        """A site has told what its private rows have spent."""
        self._append_entry({"spent": epsilon, "told_by": site})

    def note_closed(self, number: int, sites: dict[str, int]) -> None:
        """A round is over; `sites` have counted, each with the round that its update was trained in."""
        self._append_entry({"closed": number, "sites": sites})

    def recall_rounds(self, finished: int) -> RecalledRounds:
        """Return what holds after so many finished rounds, whatever was done after them and is lost."""
        rounds = RecalledRounds()
        for entry in self._read_entries():
            if "excluded" in entry:
                rounds.excluded[entry["excluded"]] = entry["reason"]
            elif "refused" in entry:
                rounds.refused.append(entry["refused"])
            elif "spent" in entry:
                rounds.spent[entry["told_by"]] = entry["spent"]
            elif "closed" in entry and entry["closed"] <= finished:
                rounds.counted |= entry["sites"]
            elif "site" in entry:
                self._recall_update(entry, finished, rounds)
            elif "model" in entry and entry["round"] <= finished + 1:
                rounds.models[entry["round"]] = entry["model"]
                rounds.open = {}
        return rounds

    def _recall_update(self, line: dict[str, Any], finished: int, rounds: RecalledRounds) -> None:
        header = line["header"].encode("ascii")
        if line["round"] <= finished:
            rounds.headers.append(header)
        elif line["round"] == finished + 1:
            with contextlib.suppress(OSError):
                values = (self._values / line["site"]).read_bytes()
                if digest_hex(values) == line["values"]:
                    rounds.open[line["site"]] = (header, values)

    def _append_entry(self, line: dict[str, Any]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(canonical_json(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            message = f"{self._path}: cannot be written ({exc.strerror}); {writing_cure(exc)}, then --resume"
            raise CheckpointError(message) from exc

    def _read_entries(self) -> Iterator[dict[str, Any]]:
        for number, text in complete_lines(self._path):
            try:
                yield json.loads(text)
            except ValueError as exc:
                raise CheckpointError(
                    f"{self._path}, line {number}: is not JSON; restore the file that the run wrote"
                ) from exc


@dataclass
class SiteShare:
    """The part of one site in one round.

    Attributes:
        loss: Mean training loss, as the site says; None where it does not.
        norm: Norm of its update; None where updates are summed and none is seen.
        scaled: Factor of the update by the site's report; None without a report.
        far_rounds: Rounds in a row in which its update was far from the aggregate; None without a rule.
        epsilon: Epsilon that its private rows have spent, by its report; None where rows are not private.
        rounds_left: Further rounds that its own budget pays for, as it says; None likewise.
    """

    loss: float | None
    num_targets: int
    samples: int
    norm: float | None
    scaled: float | None
    train_s: float
    behind: int = 0
    far_rounds: int | None = None
    epsilon: float | None = None
    rounds_left: int | None = None

    def share_row(self) -> dict[str, Any]:
        """Return the record's entry in the metrics."""
        return {name: value for name, value in vars(self).items() if value is not None or name not in _UNLESS_NONE}


@dataclass
class RoundRecord:
    """One round.

    Attributes:
        number: Number of the round, from 1.
        shares: Those that counted, by name.
        left_out: The others that were asked, with reasons.
        charge: Number of the charge of its sums; None without a privacy budget.
        lost: Why a released sum of the round gave no update, so that nothing moved; empty where one did.
        answer_s: Seconds from the order to train to a site's answer, by the owner's clock.
    """

    number: int
    asked: tuple[str, ...]
    shares: dict[str, SiteShare] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    norm: float = 0.0
    sums: tuple[int, ...] = ()
    bytes: dict[str, int] = field(default_factory=dict)
    charge: int | None = None
    lost: str = ""
    answer_s: dict[str, float] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """Mean training loss over all targets; no number where sites do not tell, or told an owner that was killed."""
        total = sum(share.loss * share.num_targets for share in self.shares.values() if share.loss is not None)
        return total / self.num_targets if self.num_targets else math.nan

    @property
    def num_targets(self) -> int:
        """Of all sites that counted."""
        return sum(share.num_targets for share in self.shares.values())

    def site_phases(self) -> dict[str, dict[str, float]]:
        """Return how long the owner waited for each site that trained in this round, by phase.

        The sum is measured here; how much of it was training is the site's claim.
        """
        phases: dict[str, dict[str, float]] = {}
        for site, share in self.shares.items():
            if site in self.answer_s and not share.behind:
                train_s = min(max(share.train_s, 0.0), self.answer_s[site])
                phases[site] = {"train": train_s, "transfer": self.answer_s[site] - train_s}
        return phases

    def metrics_row(self) -> dict[str, Any]:
        """The line of the metrics."""
        return {
            name: self.shares[name].share_row() if name in self.shares else {"left_out": self.left_out.get(name, "")}
            for name in sorted({*self.asked, *self.shares, *self.left_out})
        }


@dataclass(frozen=True)
class HeldUpdate:
    """An update that was let in.

    Attributes:
        header: Signed header; evidence of the site's statement.
    """

    round: int
    header: bytes
    vector: Tensor
    share: SiteShare


class LostRounds:
    """The rounds that were lost since one counted, and the sites that were in each of their sums."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._suspects: set[str] = set()

    def note_lost_round(self, record: RoundRecord, members: set[str], reason: str) -> None:
        """Take a round of which a sum was released and none came out; its record counts no site."""
        self._suspects = members & self._suspects if self.in_a_row else members
        if self.in_a_row == MAX_LOST_ROUNDS:
            raise FailedRoundError(
                f"round {record.number}: {MAX_LOST_ROUNDS} rounds in a row before it were lost, now this one "
                f"({reason}); sites in all of their sums: {', '.join(sorted(self._suspects)) or 'none'}; revoke the "
                "site that spoils them, and continue with --resume"
            )
        self.in_a_row += 1
        record.lost = reason
        record.left_out |= dict.fromkeys(record.shares, "the sum was lost")
        record.shares.clear()
