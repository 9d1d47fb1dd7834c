"""The search: all single acts, then pairs of acts that lead to what no run before has led to."""

import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from acts import Act, At, Crash, Schedule, Send, Withhold
from companies import COMPANIES
from generating import (
    JOINING,
    crashes,
    distinct,
    lies,
    said,
    said_about_others,
    sent_otherwise,
    singles,
    spread,
)
from liar import Point
from playing import Outcome, Theatre
from protocol_page import IDENTITY
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

    def lies_with_crashes(self) -> list[Schedule]:
        """Each lie of the insider with the end of each other party at each point where that one says something."""
        lying = self._lies()
        found = []
        for victim in self._setting.others:
            ends = [act for act in crashes(self._points[victim]) if act.at.event == "sends" or act.at.kind == "apply"]
            found += [(victim, end, lie) for end in ends for lie in lying]
        self._random.shuffle(found)
        return [self._plain.and_also(self._setting.insider, lie).and_also(victim, end) for victim, end, lie in found]

    def lies_with_words(self) -> list[Schedule]:
        """Each lie with each thing that the insider does to all of its messages of a kind.

        They are withheld, have other bytes, or there is one beside each that has another identity. Each lie is played
        once before that, for the messages that it leads to.
        """
        found, insider = [], self._setting.insider
        for lie in self._lies():
            lying = self._plain.and_also(insider, lie)
            outcome = self.play(lying)
            points = [] if outcome is None else outcome.points[f"worker-{insider}"]
            found += [lying.and_also(insider, act) for act in self._lasting(points)]
        self._random.shuffle(found)
        return found

    def _lasting(self, points: list[Point]) -> list[Act]:
        lasting: dict[object, Act] = {}
        for act in singles(points, self._names):
            deed = act.deed
            beside = isinstance(deed, Send) and deed.when == "behind" and self._is_about_others(act)
            other_bytes = isinstance(deed, Send) and deed.payload
            if act.at.lasting and (beside or other_bytes or isinstance(deed, Withhold)):
                lasting.setdefault((act.at.kind, act.at.peer, deed), replace(act, at=replace(act.at, step=None)))
        return list(lasting.values())

    def _lies(self) -> list[Act]:
        """Every lie in computations, from the first step on, and once the first step is decided."""
        firsts = [At("assign", event="gets"), At("apply", 0, event="gets")]
        return [act for at in firsts for act in lies(at) if act.deed.steps > 1 or act.deed.what == "weights"]

    @staticmethod
    def _is_about_others(act: Act) -> bool:
        return all(alter.path[0] in IDENTITY[act.at.kind] for alter in act.deed.alters)

    def answers(self) -> list[Schedule]:
        """Words that are said in a schedule and in no honest run, said by the insider as well.

        Of all schedules with the same new words the first one; the insider speaks at each point that it comes by only
        there, about that thing and about each neighbouring one.
        """
        usual = {statement[1] for statement in self._honest.coverage}
        groups: dict[frozenset[str], _Seed] = {}
        for seed in self.seeds:
            new = frozenset(each[1] for each in seed.outcome.coverage if each[1] not in {*usual, "event"})
            if new and not is_crashing(seed.schedule):
                groups.setdefault(new, seed)
        found = [list(self._answers_of(seed, kinds)) for kinds, seed in groups.items()]
        return [each for row in itertools.zip_longest(*found) for each in row if each is not None]

    def _answers_of(self, seed: _Seed, kinds: frozenset[str]) -> Iterator[Schedule]:
        insider = self._setting.insider
        usual = {point.context for point in self._points[insider]}
        fresh = [point for point in seed.outcome.points[f"worker-{insider}"] if point.context not in usual]
        for point in distinct(fresh):
            if point.at.event == "gets" and point.at.kind not in JOINING:
                for kind in sorted(kinds):
                    for act in (*said(point.at, kind, self._names), *said_about_others(point.at, kind, self._names)):
                        yield seed.schedule.and_also(insider, act)

    def play_all(self, schedules: list[Schedule], *, until: float | None = None) -> int:
        """Play schedules in their order until a time; returns how many."""
        for number, schedule in enumerate(schedules):
            if until is not None and time.monotonic() > until:
                return number
            self.play(schedule)
        return len(schedules)

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
        usual = {point.context for point in self._points[self._setting.insider]}
        fresh = [point.at for point in points if point.context not in usual]
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


def is_crashing(schedule: Schedule) -> bool:
    """Whether a party's process ends."""
    return any(isinstance(act.deed, Crash) for acts in schedule.acts.values() for act in acts)


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
