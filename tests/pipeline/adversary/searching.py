"""The search: all single acts, then pairs of acts that lead to what no run before has led to."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from account import LISTS, SeedRecord, SettingRecord, read_schedule, short_hash, short_text
from acts import STEPS_TO_LEAVE, Act, At, Schedule, Send, Withhold
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
SHARES = {"singles": 0.4, "crashes": 0.1, "words": 0.1, "pairs": 0.4}
"""Of the schedules of a setting, while each list has any left."""
POOLS = {"crashes": 0.25, "answers": 0.2, "fresh": 0.3, "usual": 0.1, "lies": 0.1, "moves": 0.05}
"""Shares of what is done beside a schedule: an honest party ends; words that no honest run has; acts at points that
no honest run has, and at all others; lies in computations; parties that leave, die or come back between two steps.
"""
PAIRS_IN_A_ROW = 16
"""Beside one schedule, before another one is drawn."""
MAX_OPEN_SEEDS = 4
"""Of a setting, with all schedules beside them in memory; another one is played again for its points."""


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
    Setting("K3 exact", 1),
    Setting("K3 economy", 1),
    Setting("K4 economy, late", 1),
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


class _Seed:
    """A schedule that led to something new, and where its parties came by."""

    def __init__(self, record: SeedRecord, schedule: Schedule, outcome: Outcome) -> None:
        self.record, self.schedule, self.outcome = record, schedule, outcome
        self.beside: Sequence[Schedule] = ()


class Search:
    """A search in one setting, which goes on where its record ends.

    Args:
        theatre: Plays schedules.
        setting: Company and insider.
        note: Told of each finding that is new.
        record: What was played before; a new one by default.
        skips_alike: Whether, of single acts with one effect, the first alone is played, and none that has no effect.

    Attributes:
        num_played: Schedules of this process, without those that were played again for what they lead to.
        num_pairs: Of these, with two acts or more.
    """

    def __init__(
        self,
        theatre: Theatre,
        setting: Setting,
        *,
        note: Callable[[Finding], None] = lambda finding: None,
        record: SettingRecord | None = None,
        skips_alike: bool = False,
    ) -> None:
        self._skips_alike = skips_alike
        self.findings: dict[str, Finding] = {}
        self.num_played = self.num_pairs = 0
        self.record = record or SettingRecord()
        self._theatre, self._setting, self._note = theatre, setting, note
        self._names = COMPANIES[setting.company].names
        self._traces: set[str] = set()
        self._seeds: dict[str, _Seed] = {}
        self._num_beside: dict[str, int] = {}
        self._lists: dict[str, list[Schedule]] = {}
        numbers = range(1, len(self._names) + 1)
        self._plain = Schedule(setting.company, {n: () for n in numbers}, steps=COMPANIES[setting.company].steps)
        self._honest = self._judge(self._plain)
        self._points = {n: self._honest.points[f"worker-{n}"] for n in numbers}
        self._note_states(self._plain, self._honest)

    def play(self, schedule: Schedule) -> Outcome | None:
        """Play a schedule, and keep it where it led to something new."""
        self.num_played += 1
        self.num_pairs += schedule.num_acts > 1
        outcome = self._judge(schedule)
        if outcome is not None:
            self._note_states(schedule, outcome)
        return outcome

    def _judge(self, schedule: Schedule) -> Outcome | None:
        try:
            outcome = self._theatre.play(schedule)
        except EndlessError as exc:
            self._note_fault(f"without an end: {exc}", schedule)
            return None
        for fault in self._theatre.faults(schedule, outcome):
            self._note_fault(fault, schedule)
        return outcome

    def _note_states(self, schedule: Schedule, outcome: Outcome) -> None:
        fresh = {*map(short_hash, outcome.coverage)} - self.record.states
        if fresh and outcome.trace not in self._traces and schedule.num_acts < MAX_ACTS:
            self.record.states |= fresh
            if schedule.num_acts:
                self.record.keep_seed(schedule, len(fresh))
        self._traces.add(outcome.trace)

    def _note_fault(self, fault: str, schedule: Schedule) -> None:
        sign = sign_of(fault, schedule)
        if sign in self.findings:
            self.findings[sign].times += 1
            return
        self.findings[sign] = Finding(sign, fault, schedule, self.num_played)
        self._note(self.findings[sign])

    @property
    def num_traces(self) -> int:
        """Runs of this process that did not go like another one."""
        return len(self._traces)

    def play_next(self, lists: Sequence[str] = LISTS) -> bool:
        """Play the next schedule of the list that is furthest behind its share; False when all are at their end."""
        names = [name for name in self._open_lists(lists) if name in lists]
        if names:
            self.play_list(min(names, key=lambda name: self.record.done[name] / SHARES[name]), 1)
        return bool(names)

    def _open_lists(self, lists: Sequence[str]) -> list[str]:
        ending = [name for name in lists if name != "pairs"]
        is_open = {name: self.record.done[name] < len(self._list(name)) for name in ending}
        is_open["pairs"] = any(self._acts_left(seed) for seed in self.record.seeds)
        return [name for name in LISTS if is_open.get(name)]

    def play_list(self, name: str, number: int) -> None:
        """Play the next schedules of one list, at most so many."""
        for _ in range(number):
            done = self.record.done[name]
            schedule = self._next_pair() if name == "pairs" else next(iter(self._list(name)[done : done + 1]), None)
            if schedule is None:
                return
            self.record.done[name] += 1
            self.play(schedule)

    def _list(self, name: str) -> list[Schedule]:
        if name not in self._lists:
            makers = {
                "singles": self._all_singles,
                "crashes": self._lies_with_crashes,
                "words": self._lies_with_words,
            }
            self._lists[name] = makers[name]()
            self.record.total[name] = len(self._lists[name])
        return self._lists[name]

    def _all_singles(self) -> list[Schedule]:
        """Every single act of the insider, spread so that a beginning of them is a cut through all."""
        insider = self._setting.insider
        acts = spread(singles(self._points[insider], self._names))
        if self._skips_alike:
            effects = self._theatre.forecast(self._setting.company, insider, acts)
            distinct_acts = {effects[act]: act for act in reversed(acts) if act in effects}.values()
            self.record.total |= {"singles alike": len(acts) - len(distinct_acts)}
            acts = list(reversed(distinct_acts))
        return [self._plain.and_also(insider, act) for act in acts]

    def _lies_with_crashes(self) -> list[Schedule]:
        """Each lie of the insider with the end of each other party at each point where that one says something."""
        found = []
        for victim in self._setting.others:
            ends = [act for act in crashes(self._points[victim]) if act.at.event == "sends" or act.at.kind == "apply"]
            found += [(victim, end, lie) for end in ends for lie in self._lies()]
        random.Random(1).shuffle(found)
        insider = self._setting.insider
        return [self._plain.and_also(insider, lie).and_also(victim, end) for victim, end, lie in found]

    def _lies_with_words(self) -> list[Schedule]:
        """Each lie with each thing that the insider does to all of its messages of a kind.

        They are withheld, have other bytes, or there is one beside each that has another identity. Each lie is played
        once before that, for the messages that it leads to.
        """
        found, insider = [], self._setting.insider
        for lie in self._lies():
            lying = self._plain.and_also(insider, lie)
            outcome = self._judge(lying)
            points = [] if outcome is None else outcome.points[f"worker-{insider}"]
            found += [lying.and_also(insider, act) for act in self._lasting(points)]
        random.Random(2).shuffle(found)
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

    def _next_pair(self) -> Schedule | None:
        """An act more beside those of a schedule that led to something new; each once, in an order of that schedule."""
        number = self.record.done["pairs"]
        seeds = [seed for seed in self.record.seeds if self._acts_left(seed)]
        if not seeds:
            return None
        # the more a schedule has led to, the more is to be found beside it; some in a row spare its being played again
        weights = [seed.fresh**2 for seed in seeds]
        (record,) = random.Random(number // PAIRS_IN_A_ROW).choices(seeds, weights)
        seed = self._seed_of(record)
        if record.done >= len(seed.beside):
            return self._next_pair()
        record.done += 1
        return seed.beside[record.done - 1]

    def _acts_left(self, record: SeedRecord) -> bool:
        return record.done < self._num_beside.get(record.schedule, record.done + 1)

    def _seed_of(self, record: SeedRecord) -> _Seed:
        seed = self._seeds.pop(record.schedule, None)
        if seed is None:
            schedule = read_schedule(record.schedule)
            outcome = self._judge(schedule)
            seed = _Seed(record, schedule, outcome or Outcome())
            seed.beside = self._schedules_beside(seed) if outcome is not None else ()
            self._num_beside[record.schedule] = len(seed.beside)
        # the one that was used last comes last
        self._seeds[record.schedule] = seed
        while len(self._seeds) > MAX_OPEN_SEEDS:
            del self._seeds[next(iter(self._seeds))]
        return seed

    def _schedules_beside(self, seed: _Seed) -> list[Schedule]:
        """A schedule with each act more that can be done, mixed by `POOLS`; as a rule where no honest run comes by."""
        insider, random_ = self._setting.insider, random.Random(seed.record.schedule)
        points = distinct(seed.outcome.points[f"worker-{insider}"])
        usual = {point.context for point in self._points[insider]}
        fresh = [point for point in points if point.context not in usual]
        kinds = {each[1] for each in seed.outcome.coverage if each[1] != "event"}
        new_kinds = kinds - {each[1] for each in self._honest.coverage}
        pools: dict[str, list[tuple[int, Act]]] = {
            "crashes": [
                (who, act) for who in self._setting.others for act in crashes(seed.outcome.points[f"worker-{who}"])
            ],
            "answers": [(insider, act) for act in self._words_at(fresh, new_kinds)],
            "fresh": [(insider, act) for act in self._done_at(fresh, kinds)],
            "usual": [(insider, act) for act in self._done_at(points, kinds)],
            "lies": [(insider, act) for point in points for act in lies(point.at)],
        }
        for pool in pools.values():
            random_.shuffle(pool)
        moved = list(self._moved(seed.schedule))
        random_.shuffle(moved)
        order = set[tuple[int, Act]]()
        schedules: list[Schedule] = []
        while any(pools.values()) or moved:
            names = [name for name in pools if pools[name]] + ["moves"] * bool(moved)
            (name,) = random_.choices(names, [POOLS[name] for name in names])
            if name == "moves":
                schedules.append(moved.pop())
                continue
            who, act = pools[name].pop()
            if (who, act) not in order:
                order.add((who, act))
                schedules.append(seed.schedule.and_also(who, act))
        return schedules

    def _moved(self, schedule: Schedule) -> Iterator[Schedule]:
        """The schedule with a party that leaves, dies, or leaves and comes back between two steps; once."""
        for who in () if schedule.moves else range(1, len(self._names) + 1):
            for step in range(1, schedule.steps):
                for what in ("leave", "kill"):
                    # it goes on until whoever wants to leave has left
                    longer = replace(schedule, steps=max(schedule.steps, step + STEPS_TO_LEAVE))
                    yield longer.moved((step, what, who))
                    for later in range(step + 1, schedule.steps):
                        yield schedule.moved((step, what, who), (later, "return", who))

    def _done_at(self, points: list[Point], kinds: set[str]) -> Iterator[Act]:
        for point in points:
            if point.at.event == "sends":
                yield from sent_otherwise(point.at, self._names)
        yield from self._words_at(points, kinds)

    def _words_at(self, points: list[Point], kinds: set[str]) -> Iterator[Act]:
        """Words of these kinds, about the thing at each point and about each neighbouring one."""
        for point in points:
            if point.at.event == "gets" and point.at.kind not in JOINING:
                for kind in sorted(kinds):
                    yield from said(point.at, kind, self._names)
                    yield from said_about_others(point.at, kind, self._names)


def sign_of(fault: str, schedule: Schedule) -> str:
    """A fault without what differs from one schedule to the next: names, numbers, digests."""
    for name in sorted(schedule.liars, reverse=True):
        fault = fault.replace(name, "LIAR")
    fault = re.sub(r"worker-\d+(\.\d+)?", "HONEST", fault)
    fault = re.sub(r"Doubt\(.*\)\]", "...]", fault)
    return re.sub(r"[0-9a-f]{16,}|\d+(\.\d+)?(e[-+]\d+)?", "#", fault)[:160]


def describe(finding: Finding) -> str:
    """A finding as lines that can be pasted."""
    return f"after {finding.number} schedules: {finding.fault}\n    {short_text(finding.schedule)}"
