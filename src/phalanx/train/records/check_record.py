"""The record of checks: which steps were recomputed, by which parties, and which are in doubt after a conviction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from phalanx.errors import CheckpointError
from phalanx.pipeline import CHECKS, OWNER, GuardConfig, StageChecks
from phalanx.security.crypto import certified_name

Range = tuple[int, int]
"""First and last step."""


class Spans:
    """A set of steps that grows at its end.

    Args:
        ranges: Ascending, and none touches the next.
        limit: With more ranges than that, the two oldest become one, and the steps between them count as held from then
            on; `num_steps` stays the number of added steps.
    """

    def __init__(self, ranges: Iterable[Range] = (), *, limit: int, bridged: int = 0) -> None:
        self.ranges = [(int(first), int(last)) for first, last in ranges]
        self._limit = limit
        self._bridged = bridged

    @classmethod
    def from_json(cls, saved: dict[str, object], limit: int) -> Self:
        """Read what `to_json` wrote."""
        ranges: Iterable[Range] = saved["ranges"]  # type: ignore[assignment]
        return cls(ranges, limit=limit, bridged=int(str(saved["bridged"])))

    def to_json(self) -> dict[str, object]:
        """Everything, as JSON data."""
        return {"ranges": [list(ends) for ends in self.ranges], "bridged": self._bridged}

    @property
    def step_count(self) -> int:
        """How many steps."""
        return sum(last - first + 1 for first, last in self.ranges) - self._bridged

    @property
    def newest_step(self) -> int | None:
        """The newest step; None when there is none."""
        return self.ranges[-1][1] if self.ranges else None

    def add_range(self, first: int, last: int) -> None:
        """Put in the steps from `first` to `last`."""
        tail = self.ranges[-1:]
        if not tail or first > tail[0][1]:
            # as a rule: thousands of ranges are sorted only after a rollback
            self.ranges[-1:] = merge_ranges([*tail, (first, last)])
        else:
            self.ranges = merge_ranges([*self.ranges, (first, last)])
        if len(self.ranges) > self._limit:
            (oldest, end_step), (begin, newest), *rest = self.ranges
            self._bridged += begin - end_step - 1
            self.ranges = [(oldest, newest), *rest]

    def take_out(self, first: int, last: int | None = None) -> list[Range]:
        """Take out the steps from `first` on, up to `last` where it is given."""
        taken, remaining = [], []
        for low, high in self.ranges:
            begin, end_step = max(low, first), high if last is None else min(high, last)
            if begin > end_step:
                remaining.append((low, high))
                continue
            taken.append((begin, end_step))
            remaining += [ends for ends in ((low, begin - 1), (end_step + 1, high)) if ends[0] <= ends[1]]
        self.ranges = remaining
        return taken


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Ranges that hold the same steps, ascending, none of which touches the next."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


_RANGES = 256
"""So many ranges of older steps are kept apart; a summary is no list of a million steps."""

_Work = tuple[int, str, frozenset[str] | None]
"""Stage, party that served it, and the parties on which it rests that its work was recomputed, as in `StageChecks`."""


@dataclass(frozen=True)
class Doubt:
    """Steps of one stage that hold the work of a distrusted party and were not recomputed in full.

    Attributes:
        party: The party that served the stage.
        convicted_in: Steps of its verdicts; none where it was replaced without one.
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
        return _count_steps(self.steps)

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
        owner or by a party that was not convicted; or it was undone. So is a step of a party that was replaced for its
        acts, from before that. Reports of an auditor of either kind until then count as not made. A step between two
        recomputed ones is in doubt as well: its lie would be in the weights that the later one began with.

    Args:
        guard: Decides how far back the run can go.
    """

    def __init__(self, guard: GuardConfig | None = None) -> None:
        self._limit = _RANGES + (0 if guard is None else guard.commit_lag)
        self._work: dict[_Work, Spans] = {}
        self._made: dict[tuple[int, str], Spans] = {}
        self._convicted: dict[str, list[int]] = {}
        self._replaced: dict[str, int] = {}
        """Last step in which a certificate's party was replaced because of its behaviour."""
        self._refuted: list[tuple[tuple[int, str], int]] = []
        """Stage and party, and the step of the update that it was convicted for."""

    # --- what happens -----------------------------------------------------------------------------

    def note_applied(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        """Take a step that is applied."""
        for stage, checks in stages.items():
            for check in checks.made:
                self._made.setdefault((stage, check), Spans(limit=self._limit)).add_range(step, step)
            self._spans_of((stage, checks.party, checks.rests_on)).add_range(step, step)

    def observe(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event; others than those about convictions and undone or redone steps change nothing."""
        if kind == "verdict":
            self._note_conviction(body["party"], body["step"])
            if body["offence"] == "state" and not body.get("undone"):
                # it is about what the update of the step before led to
                self._refuted.append(((body["stage"], body["party"]), body["step"] - 1))
                self._move_refuted()
        elif kind == "distrusted":
            self._replaced[certified_name(body["party"])] = body["step"]
        elif kind == "rolled_back":
            for spans in (*self._work.values(), *self._made.values()):
                spans.take_out(body["to"])

    def _move_refuted(self) -> None:
        for whose, step in self._refuted:
            self._move_steps(whose, step, step, None)

    def _note_conviction(self, party: str, step: int) -> None:
        steps = self._convicted.setdefault(certified_name(party), [])
        if step not in steps:
            steps.append(step)

    def _move_steps(self, whose: tuple[int, str], first: int, last: int, word: frozenset[str] | None) -> None:
        """From now on it rests on something else that these steps are right."""
        taken = [
            ends
            for work, spans in self._work.items()
            if work[:2] == whose and work[2] != word
            for ends in spans.take_out(first, last)
        ]
        for ends in taken:
            self._spans_of((*whose, word)).add_range(*ends)

    def _spans_of(self, work: _Work) -> Spans:
        return self._work.setdefault(work, Spans(limit=self._limit))

    # --- what follows from it -----------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no stage has ever been in other hands."""
        return not self._work

    def list_doubts(self) -> list[Doubt]:
        """The steps in doubt, by party and stage."""
        doubts = []
        for stage, party in sorted({work[:2] for work in self._work}):
            certified = certified_name(party)
            convicted_in, replaced_in = self._convicted.get(certified, []), self._replaced.get(certified, 0)
            works = [work for work in self._work if work[:2] == (stage, party)]
            steps = merge_ranges(ends for work in works for ends in self._unverified_ranges(work))
            if not convicted_in:
                steps = _ranges_before(steps, replaced_in)
            if steps:
                rest = Spans(
                    merge_ranges(ends for work in works for ends in self._work[work].ranges), limit=self._limit
                )
                for ends in steps:
                    rest.take_out(*ends)
                doubts.append(Doubt(party, stage, tuple(convicted_in), tuple(steps), rest.newest_step))
        return doubts

    def _unverified_ranges(self, work: _Work) -> list[Range]:
        """The steps of some work for which no trusted party's word stands."""
        ranges, certified_names = self._work[work].ranges, [certified_name(name) for name in work[2] or ()]
        if work[2] is None or any(name in self._convicted for name in certified_names):
            return ranges
        return _ranges_before(ranges, max((self._replaced.get(name, 0) for name in certified_names), default=0))

    def unverified_counts(self) -> dict[int, int]:
        """By stage: steps of workers that no party, or only a convicted one, has recomputed in full."""
        parties = sorted({work[:2] for work in self._work})
        return {
            stage: sum(
                self._work[work].step_count
                for party in parties
                if party[0] == stage
                for work in self._unverified_work(*party)
            )
            for stage in sorted({stage for stage, _ in parties})
        }

    def checks_by_stage(self) -> dict[int, dict[str, Any]]:
        """By stage: its steps in other hands; and in how many steps each check was made, and in which one last."""
        rows: dict[int, dict[str, Any]] = {}
        for stage in sorted({work[0] for work in self._work}):
            steps = merge_ranges(
                ends for work, spans in self._work.items() if work[0] == stage for ends in spans.ranges
            )
            row: dict[str, Any] = {"steps": _count_steps(steps)}
            for check in CHECKS:
                spans = self._made.get((stage, check), Spans(limit=self._limit))
                row[check] = {"steps": spans.step_count, "last": spans.newest_step}
            rows[stage] = row
        return rows

    def _unverified_work(self, stage: int, party: str) -> set[_Work]:
        """The work of a party that no party without a conviction has recomputed in full."""
        return {
            work
            for work in self._work
            if work[:2] == (stage, party)
            and (work[2] is None or any(certified_name(name) in self._convicted for name in work[2]))
        }

    # --- for a checkpoint ---------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the record for a resumed run."""
        return {
            "work": [
                [stage, party, None if word is None else sorted(word), spans.to_json()]
                for (stage, party, word), spans in self._work.items()
            ],
            "made": [[stage, check, spans.to_json()] for (stage, check), spans in self._made.items()],
            "convicted": self._convicted,
            "replaced": self._replaced,
        }

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Take over the record of a checkpoint; convictions stay, whichever checkpoint it is."""
        try:
            self._work = {
                (int(stage), str(party), None if word is None else frozenset(word)): Spans.from_json(spans, self._limit)
                for stage, party, word, spans in saved["work"]
            }
            self._made = {
                (int(stage), str(check)): Spans.from_json(spans, self._limit) for stage, check, spans in saved["made"]
            }
            for party, steps in saved["convicted"].items():
                for step in steps:
                    self._note_conviction(party, step)
            for party, last in saved.get("replaced", {}).items():
                self._replaced[str(party)] = max(int(last), self._replaced.get(str(party), 0))
            self._move_refuted()
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"checkpoint: its record of checks is malformed ({exc}); use an older one") from exc


def _ranges_before(ranges: Iterable[Range], step: int) -> list[Range]:
    """The steps of ranges that come before one."""
    return [(first, min(last, step - 1)) for first, last in ranges if first < step]


def _count_steps(ranges: Iterable[Range]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def adopted_record(saved: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """Return the part of another run's record that a new run takes over: its parties are others, whatever their names.

    Args:
        saved: Written by `CheckRecord.to_json`.
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
        "replaced": dict(zip(called(saved.get("replaced", {})), saved.get("replaced", {}).values(), strict=True)),
    }
