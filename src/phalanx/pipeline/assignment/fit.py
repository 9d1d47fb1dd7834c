"""A search for an assignment that fits into every party's memory: the wanted one, or as much of it as fits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.assignment.memory import Memory
from phalanx.pipeline.config import OWNER

_TRIES = 20_000
"""Placements of one stage that are tried; all there are for a handful of stages and workers."""


def fit_assignment(
    wanted: Assignment, workers: Sequence[str], memory: Memory, *, holders_stay: bool = False
) -> Assignment:
    """The wanted assignment if it fits; else one that does, with as much of it as can be; else the wanted one.

    Args:
        wanted: An assignment with a shadow for every stage of a worker, or with none.
        workers: Workers that can hold and shadow; the owner shadows where no worker can, and holds no further stage.
        memory: Needs of the stages and limits of the parties.
        holders_stay: Only shadows may be others: no other party has the states of the stages.

    Guarantees:
        Where any assignment fits, it is found, unless there are too many to try them all.
    """
    if memory.excess_bytes(wanted.holders, wanted.shadows) == 0:
        return wanted
    fitted = _FitSearch(wanted, workers, memory, holders_stay).find_fit()
    return wanted if fitted is None else fitted


@dataclass
class _FitSearch:
    wanted: Assignment
    workers: Sequence[str]
    memory: Memory
    holders_stay: bool
    num_tries: int = 0
    needs: dict[str, int] = field(default_factory=dict)

    def find_fit(self) -> Assignment | None:
        """The first assignment that fits, the largest stages placed first; None when none was found."""
        last = max(self.wanted.holders, default=0)
        ends = {stage: holder for stage, holder in self.wanted.holders.items() if not 0 < stage < last}
        self.needs = self.memory.bytes_by_party(ends, {})
        stages = sorted(self.wanted.holders.keys() - ends.keys(), key=self._stage_size, reverse=True)
        placed = self._place_stages(stages) if self.memory.excess_of(self.needs) == 0 else None
        if placed is None:
            return None
        holders = {
            stage: placed[stage][0] if stage in placed else holder for stage, holder in self.wanted.holders.items()
        }
        shadows = {stage: shadow for stage in sorted(placed) if (shadow := placed[stage][1]) is not None}
        return Assignment(holders, shadows)

    def _stage_size(self, stage: int) -> int:
        needed = self.memory.footprint_of(stage)
        return needed.held + needed.shadowed

    def _place_stages(self, stages: Sequence[int]) -> dict[int, tuple[str, str | None]] | None:
        if not stages:
            return {}
        stage, rest = stages[0], stages[1:]
        for holder, shadow in self._candidate_pairs(stage):
            self.num_tries += 1
            if self.num_tries > _TRIES:
                return None
            self._count_roles(stage, holder, shadow, 1)
            placed = self._place_stages(rest) if self.memory.excess_of(self.needs) == 0 else None
            self._count_roles(stage, holder, shadow, -1)
            if placed is not None:
                return {stage: (holder, shadow), **placed}
        return None

    def _candidate_pairs(self, stage: int) -> Iterator[tuple[str, str | None]]:
        """Yield pairs that could hold and shadow a stage: the wanted parties first, then those with most room."""
        wanted_holder, shadow = self.wanted.holders[stage], self.wanted.shadows.get(stage)
        ranks = {worker: self._free_memory(worker) for worker in self.workers}
        roomy = sorted(self.workers, key=lambda worker: -ranks[worker])
        for holder in _wanted_first(wanted_holder, [] if self.holders_stay else roomy):
            if shadow is None:
                yield holder, None
                continue
            for other in _wanted_first(shadow, [*roomy, OWNER]):
                if other != holder:
                    yield holder, other

    def _free_memory(self, worker: str) -> float:
        bytes_left = self.memory.free_bytes(worker, self.needs)
        return math.inf if bytes_left is None else float(bytes_left)

    def _count_roles(self, stage: int, holder: str, shadow: str | None, sign: int) -> None:
        roles: Mapping[int, str] = {} if shadow is None else {stage: shadow}
        for party, size in self.memory.bytes_by_party({stage: holder}, roles).items():
            self.needs[party] = self.needs.get(party, 0) + sign * size


def _wanted_first(wanted: str, others: Sequence[str]) -> Iterator[str]:
    """The wanted one, and then the others."""
    yield wanted
    yield from (other for other in others if other != wanted)
