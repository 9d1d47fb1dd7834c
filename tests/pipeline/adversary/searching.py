"""The search: all single acts, then pairs of acts that lead to what no run before has led to."""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from acts import Act, Schedule
from companies import COMPANIES
from generating import crashes, lies, said, said_about_others, sent_otherwise, singles, spread
from playing import Outcome, Theatre
from turns import EndlessError


MAX_ACTS = 3
"""Acts of a schedule."""
CRASHES, FRESH, LYING = 0.3, 0.5, 0.1
"""Shares of pairs in which an honest party crashes; the insider acts at a point that no honest run has; it lies."""


@dataclass(frozen=True)
class Setting:
    """A company, and the number of the worker that is the insider."""

    company: str
    insider: int

    @property
    def others(self) -> list[int]:
        """Numbers of the honest workers."""
        return [n for n in range(1, COMPANIES[self.company].workers + 1) if n != self.insider]


SETTINGS = (
    Setting("K3", 1),
    Setting("K3 two stages", 1),
    Setting("K4 spare", 1),
    Setting("K4 two stages, default", 1),
    Setting("K3 mixed", 1),
    Setting("K4", 2),
    Setting("K4 kept", 1),
    Setting("K3 patient", 1),
    Setting("K4 spare, lockstep", 1),
    Setting("K3 two stages", 2),
    Setting("K4 two stages", 1),
    Setting("K4 spare", 3),
)
"""One insider with one stage, one with two, a shadow without a stage; with and without a party to spare."""


@dataclass
class Finding:
    """An invariant that did not hold.

    Attributes:
        sign: The fault, without names and numbers.
        fault: As it was first.
        schedule: The first one.
        number: How many schedules had been played by then.
        times: How often it was found.
    """

    sign: str
    fault: str
    schedule: Schedule
    number: int
    times: int = 1


@dataclass
class _Seed:
    """A schedule that led to something new, and where its parties came by."""

    schedule: Schedule
    outcome: Outcome
    fresh: set = field(default_factory=set)


class Search:
    """A search in one setting.

    Args:
        theatre: Plays schedules.
        setting: Company and insider.
        seed: Of what is drawn.
        note: Told of each finding that is new.
    """

    def __init__(
        self, theatre: Theatre, setting: Setting, seed: int = 1, note: Callable[[Finding], None] = lambda finding: None
    ) -> None:
        self.findings: dict[str, Finding] = {}
        self.num_played = 0
        self.seeds: list[_Seed] = []
        self._theatre, self._setting, self._note = theatre, setting, note
        self._random = random.Random(seed)
        self._names = COMPANIES[setting.company].names
        self._coverage: set = set()
        self._traces: set[str] = set()
        self._played: set[str] = set()
        numbers = range(1, len(self._names) + 1)
        self._plain = Schedule(setting.company, {n: () for n in numbers}, steps=COMPANIES[setting.company].steps)
        self._honest = self.play(self._plain)
        self._points = {n: self._honest.points[f"worker-{n}"] for n in numbers}

    def play(self, schedule: Schedule) -> Outcome | None:
        """Play a schedule, and keep it where it led to something new."""
        self.num_played += 1
        try:
            outcome = self._theatre.play(schedule)
        except EndlessError as exc:
            self._find(f"without an end: {exc}", schedule)
            return None
        for fault in self._theatre.faults(schedule, outcome):
            self._find(fault, schedule)
        fresh = outcome.coverage - self._coverage
        if fresh and outcome.trace not in self._traces and schedule.num_acts < MAX_ACTS:
            self._coverage |= fresh
            self.seeds.append(_Seed(schedule, outcome, fresh))
        self._traces.add(outcome.trace)
        return outcome

    def _find(self, fault: str, schedule: Schedule) -> None:
        sign = sign_of(fault, schedule)
        if sign in self.findings:
            self.findings[sign].times += 1
            return
        self.findings[sign] = Finding(sign, fault, schedule, self.num_played)
        self._note(self.findings[sign])

    @property
    def num_traces(self) -> int:
        """Runs that did not go like another one."""
        return len(self._traces)

    def all_singles(self) -> list[Act]:
        """Every single act of the insider, spread so that a beginning of them is a cut through all."""
        return spread(singles(self._points[self._setting.insider], self._names))

    def play_singles(self, most: int, *, first: int = 0, until: float | None = None) -> int:
        """Play single acts in their order, from a number on, up to a number or a time; returns how many."""
        acts = self.all_singles()[first : first + most]
        for number, act in enumerate(acts):
            if until is not None and time.monotonic() > until:
                return number
            self.play(self._plain.and_also(self._setting.insider, act))
        return len(acts)

    def play_pairs(self, most: int | None = None, until: float | None = None) -> int:
        """Play pairs: an act more beside those of a schedule that led to something new; none twice."""
        number = misses = 0
        while (most is None or number < most) and (until is None or time.monotonic() < until) and misses < 1000:
            schedule = self._draw_pair()
            if schedule is None or repr(schedule) in self._played:
                misses += 1
                continue
            misses, number = 0, number + 1
            self._played.add(repr(schedule))
            self.play(schedule)
        return number

    def _draw_pair(self) -> Schedule | None:
        # the more a schedule has led to, the more is to be found beside it
        (seed,) = self._random.choices(self.seeds, [len(seed.fresh) ** 2 for seed in self.seeds])
        chance = self._random.random()
        if chance < CRASHES:
            who = self._random.choice(self._setting.others)
            acts = list(crashes(seed.outcome.points[f"worker-{who}"]))
        else:
            who = self._setting.insider
            acts = self._acts_beside(seed, chance)
        return seed.schedule.and_also(who, self._random.choice(acts)) if acts else None

    def _acts_beside(self, seed: _Seed, chance: float) -> list[Act]:
        """Acts of the insider at one point of a seed's run; as a rule one that it comes by only there."""
        points = seed.outcome.points[f"worker-{self._setting.insider}"]
        usual = {point.at for point in self._points[self._setting.insider]}
        fresh = [point.at for point in points if point.at not in usual]
        at = self._random.choice(fresh if fresh and chance < CRASHES + FRESH else [point.at for point in points])
        if at.event == "sends":
            return list(sent_otherwise(at, self._names))
        if chance > 1 - LYING:
            return list(lies(at))
        kind = self._random.choice(self._kinds(seed))
        return [*said(at, kind, self._names), *said_about_others(at, kind, self._names)]

    def _kinds(self, seed: _Seed) -> list[str]:
        """Kinds that are said in what is new with a seed; where there are none, all that it has."""
        spoken = [statement[1] for statement in seed.fresh if statement[1] != "event"]
        return sorted({*spoken}) or sorted({each[1] for each in seed.outcome.coverage if each[1] != "event"})


def sign_of(fault: str, schedule: Schedule) -> str:
    """A fault without what differs from one schedule to the next: names, numbers, digests."""
    for name in sorted(schedule.liars, reverse=True):
        fault = fault.replace(name, "LIAR")
    fault = re.sub(r"worker-\d+(\.\d+)?", "HONEST", fault)
    fault = re.sub(r"Doubt\(.*\)\]", "...]", fault)
    return re.sub(r"[0-9a-f]{16,}|\d+(\.\d+)?(e[-+]\d+)?", "#", fault)[:160]


def describe(finding: Finding) -> str:
    """A finding as lines that can be pasted."""
    return f"after {finding.number} schedules: {finding.fault}\n    {finding.schedule!r}"
