"""The record of checks: which steps were recomputed, by which parties, and which are in doubt after a conviction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.pipeline import CHECKS, OWNER, GuardConfig, StageChecks
from phalanx.security.crypto import certified_name
from phalanx.train.records.spans import Range, Spans, union

_RANGES = 256
"""So many ranges of older steps are kept apart; a summary is no list of a million steps."""

_Work = tuple[int, str, frozenset[str] | None]
"""Stage, party that served it, and the parties on which it rests that its work was recomputed, as in `StageChecks`."""


@dataclass(frozen=True)
class Doubt:
    """Steps of one stage that hold the work of a convicted party and were not recomputed in full.

    Attributes:
        party: The party that served the stage.
        stage: Which one.
        convicted_in: Steps of its verdicts.
        steps: Those in doubt, as ranges.
        last_verified: Last step of that party at that stage that was recomputed in full; None where none was.
    """

    party: str
    stage: int
    convicted_in: tuple[int, ...]
    steps: tuple[Range, ...]
    last_verified: int | None

    @property
    def num_steps(self) -> int:
        """How many steps are in doubt."""
        return _length(self.steps)

    def to_json(self) -> dict[str, Any]:
        """For ``summary.json`` and the audit log."""
        return {
            "party": self.party,
            "stage": self.stage,
            "convicted_in": list(self.convicted_in),
            "steps": [list(ends) for ends in self.steps],
            "num_steps": self.num_steps,
            "last_verified": self.last_verified,
        }


class CheckRecord:
    """The record of the applied steps of a run, of what undoes them, and of convictions.

    Guarantees:
        A step of a convicted party is in doubt unless all of its work in it was recomputed, update included, by the
        owner or by a party that was not convicted; or it was undone. What an auditor that was convicted later
        reported counts as not recomputed. A step between two recomputed ones is in doubt as well: its lie would
        be in the weights that the later one began with.

    Args:
        guard: How far back the run can go.
    """

    def __init__(self, guard: GuardConfig | None = None) -> None:
        undoable = 0 if guard is None else max(guard.undoable_steps, guard.snapshot_every)
        self._limit = _RANGES + undoable
        self._work: dict[_Work, Spans] = {}
        self._made: dict[tuple[int, str], Spans] = {}
        self._convicted: dict[str, list[int]] = {}
        self._refuted: list[tuple[tuple[int, str], int]] = []
        """Stage and party, and the step of the update that it was convicted for."""

    # --- what happens -----------------------------------------------------------------------------

    def applied(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        """Take a step that is applied."""
        for stage, checks in stages.items():
            for check in checks.made:
                self._made.setdefault((stage, check), Spans(limit=self._limit)).add(step, step)
            self._spans((stage, checks.party, checks.rests_on)).add(step, step)

    def observe(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event; others than those about convictions and undone or redone steps change nothing."""
        if kind == "verdict":
            self._convict(body["party"], body["step"])
            if body["offence"] == "state":
                # it is about what the update of the step before led to
                self._refuted.append(((body["stage"], body["party"]), body["step"] - 1))
                self._refute()
        elif kind == "replayed":
            self._move((body["stage"], body["party"]), body["from"], body["to"] - 1, frozenset())
        elif kind == "rolled_back":
            for spans in (*self._work.values(), *self._made.values()):
                spans.take_out(body["to"])

    def _refute(self) -> None:
        for whose, step in self._refuted:
            self._move(whose, step, step, None)

    def _convict(self, party: str, step: int) -> None:
        steps = self._convicted.setdefault(certified_name(party), [])
        if step not in steps:
            steps.append(step)

    def _move(self, whose: tuple[int, str], first: int, last: int, word: frozenset[str] | None) -> None:
        """From now on it rests on something else that these steps are right."""
        taken = [
            ends
            for work, spans in self._work.items()
            if work[:2] == whose and work[2] != word
            for ends in spans.take_out(first, last)
        ]
        for ends in taken:
            self._spans((*whose, word)).add(*ends)

    def _spans(self, work: _Work) -> Spans:
        return self._work.setdefault(work, Spans(limit=self._limit))

    # --- what follows from it -----------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no stage has ever been in other hands."""
        return not self._work

    def doubts(self) -> list[Doubt]:
        """The steps in doubt, by party and stage."""
        found = []
        for stage, party in sorted({work[:2] for work in self._work}):
            steps = union(ends for work in self._unverified(stage, party) for ends in self._work[work].ranges)
            convicted_in = self._convicted.get(certified_name(party))
            if convicted_in is not None and steps:
                good = {work for work in self._work if work[:2] == (stage, party)} - self._unverified(stage, party)
                last = max((end for work in good if (end := self._work[work].last) is not None), default=None)
                found.append(Doubt(party, stage, tuple(convicted_in), tuple(steps), last))
        return found

    def believed(self) -> dict[int, int]:
        """By stage: steps of workers that no party, or only a convicted one, has recomputed in full."""
        parties = sorted({work[:2] for work in self._work})
        return {
            stage: sum(
                self._work[work].num for party in parties if party[0] == stage for work in self._unverified(*party)
            )
            for stage in sorted({stage for stage, _ in parties})
        }

    def checks(self) -> dict[int, dict[str, Any]]:
        """By stage: its steps in other hands; and in how many steps each check was made, and in which one last."""
        found: dict[int, dict[str, Any]] = {}
        for stage in sorted({work[0] for work in self._work}):
            steps = union(ends for work, spans in self._work.items() if work[0] == stage for ends in spans.ranges)
            row: dict[str, Any] = {"steps": _length(steps)}
            for check in CHECKS:
                spans = self._made.get((stage, check), Spans(limit=self._limit))
                row[check] = {"steps": spans.num, "last": spans.last}
            found[stage] = row
        return found

    def _unverified(self, stage: int, party: str) -> set[_Work]:
        """The work of a party that no party without a conviction has recomputed in full."""
        return {
            work
            for work in self._work
            if work[:2] == (stage, party)
            and (work[2] is None or any(certified_name(name) in self._convicted for name in work[2]))
        }

    # --- for a checkpoint ---------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed run must know."""
        return {
            "work": [
                [stage, party, None if word is None else sorted(word), spans.to_json()]
                for (stage, party, word), spans in self._work.items()
            ],
            "made": [[stage, check, spans.to_json()] for (stage, check), spans in self._made.items()],
            "convicted": self._convicted,
        }

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Take over what was known at a checkpoint; convictions stay, whichever checkpoint it is.

        Raises:
            CheckpointError: It is malformed.
        """
        try:
            self._work = {
                (int(stage), str(party), None if word is None else frozenset(word)): Spans.of_json(spans, self._limit)
                for stage, party, word, spans in saved["work"]
            }
            self._made = {
                (int(stage), str(check)): Spans.of_json(spans, self._limit) for stage, check, spans in saved["made"]
            }
            for party, steps in saved["convicted"].items():
                for step in steps:
                    self._convict(party, step)
            self._refute()
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"checkpoint: its record of checks is malformed ({exc}); use an older one") from exc


def _length(ranges: Iterable[Range]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def adopted_record(saved: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """Return what a new run takes over of another one's record: its parties are others, whatever their names.

    Args:
        saved: As `CheckRecord.to_json` wrote it.
        run_id: Of the run that it is from.
    """

    def called(names: Iterable[str]) -> list[str]:
        # a party that is there already as another run's stays what it is
        return [name if "/" in name or name == OWNER else f"{run_id[:8]}/{name}" for name in names]

    return {
        "work": [
            [stage, called([party])[0], None if word is None else called(word), spans]
            for stage, party, word, spans in saved["work"]
        ],
        "made": saved["made"],
        "convicted": dict(zip(called(saved["convicted"]), saved["convicted"].values(), strict=True)),
    }
