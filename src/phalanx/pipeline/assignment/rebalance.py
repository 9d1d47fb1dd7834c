"""Rebalancing: a new assignment when workers have come or are about to leave, with as few moved stages as possible."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.pipeline.assignment.assignment import Assignment, cover_stages
from phalanx.pipeline.assignment.fit import fit_assignment
from phalanx.pipeline.assignment.memory import UNBOUNDED, Memory
from phalanx.pipeline.config import OWNER

_ROUNDING = 1e-9


def rebalance_assignment(
    old: Assignment,
    workers: Sequence[str],
    *,
    guarded: bool,
    costs: Sequence[float] = (),
    pace: Mapping[str, float] = MappingProxyType({}),
    memory: Memory = UNBOUNDED,
) -> Assignment:
    """Spread the middle stages over the workers that are there, and let idle workers shadow.

    Args:
        old: The present assignment; every party in it can still send its states.
        workers: Workers that take part from now on.
        costs: Work of each stage; left out, each is as much as another.
        pace: Time that a worker needs for a unit of work; one that is left out is as fast as the mean of the others.
        memory: Needs of the stages and limits of the parties. An assignment that fits is preferred to any other; where
            none fits, the one with the smallest excess is chosen.
    """
    field = _BalanceInputs(workers, costs, pace, memory)
    new = _move_stages(old, field, guarded=guarded)
    if field.excess_memory(new) == 0:
        return new
    packed = fit_assignment(new, workers, memory)
    stays = [old] if _can_stay(old, workers, guarded=guarded) else []
    options = [new, packed, _move_stages(packed, field, guarded=guarded), *stays]

    def rank(option: Assignment) -> tuple[int, float]:
        return field.excess_memory(option), max(field.seconds_by_worker(option.holders).values(), default=0.0)

    return min(options, key=rank)


def worker_seconds(
    holders: Mapping[int, str],
    workers: Sequence[str],
    costs: Sequence[float] = (),
    pace: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the time that each worker needs for its stages."""
    paces = [pace[worker] for worker in workers if worker in pace]
    usual = sum(paces) / len(paces) if paces else 1.0
    return {
        worker: pace.get(worker, usual)
        * sum((costs[stage] if costs else 1.0) for stage, who in holders.items() if who == worker)
        for worker in workers
    }


@dataclass(frozen=True)
class _BalanceInputs:
    """The workers that could have stages, the costs of these, and the measures by which assignments are compared."""

    workers: Sequence[str]
    costs: Sequence[float]
    pace: Mapping[str, float]
    memory: Memory

    def seconds_by_worker(self, holders: Mapping[int, str]) -> dict[str, float]:
        """Time that each worker needs."""
        return worker_seconds(holders, self.workers, self.costs, self.pace)

    def excess_memory(self, assignment: Assignment) -> int:
        """Bytes too many."""
        return self.memory.excess_bytes(assignment.holders, assignment.shadows)

    def excess_with(self, holders: Mapping[int, str], old: Assignment) -> int:
        """Bytes too many with these holders, and with those shadows that can stay."""
        return self.memory.excess_bytes(holders, _keep_shadows(old, holders, self.workers))


def _move_stages(old: Assignment, field: _BalanceInputs, *, guarded: bool) -> Assignment:
    holders = _spread_stages(old, field)
    shadows: dict[int, str] = {}
    if guarded:
        shadows = cover_stages(holders, _keep_shadows(old, holders, field.workers), field.workers, field.memory)
        _relieve_shadows(holders, shadows, field)
    return Assignment(holders, shadows)


def _spread_stages(old: Assignment, field: _BalanceInputs) -> dict[int, str]:
    """Give middle stages of the owner and of leaving workers to workers; then move stages as long as that helps."""
    holders, workers = dict(old.holders), field.workers
    if not workers:
        return dict.fromkeys(holders, OWNER)
    middle = [stage for stage in sorted(holders) if 0 < stage < max(holders)]
    for stage in [stage for stage in middle if holders[stage] not in workers]:
        ranks = {}
        for worker in workers:
            candidate = {**holders, stage: worker}
            # a shadow has the state already
            is_new = worker != old.shadows.get(stage)
            ranks[worker] = (field.excess_with(candidate, old), field.seconds_by_worker(candidate)[worker], is_new)
        holders[stage] = min(workers, key=ranks.__getitem__)
    while (moved := _best_move(holders, old, field)) is not None:
        holders[moved[0]] = moved[1]
    return holders


def _best_move(holders: Mapping[int, str], old: Assignment, field: _BalanceInputs) -> tuple[int, str] | None:
    """Return a stage of the slowest worker and the worker that would finish it soonest; None when none would be sooner.

    A worker without room for a stage is not given it.
    """
    before, crowded = field.seconds_by_worker(holders), field.excess_with(holders, old)
    slowest = max(field.workers, key=before.__getitem__)
    mine = [stage for stage, who in holders.items() if who == slowest]
    moves = [
        (stage, worker)
        for stage in mine
        for worker in field.workers
        if worker != slowest and field.excess_with({**holders, stage: worker}, old) <= crowded
    ]
    after = {(stage, worker): field.seconds_by_worker({**holders, stage: worker})[worker] for stage, worker in moves}
    best = min(moves, key=lambda move: (after[move], old.shadows.get(move[0]) != move[1], -move[0]), default=None)
    return best if best is not None and after[best] < before[slowest] * (1 - _ROUNDING) else None


def _keep_shadows(old: Assignment, holders: Mapping[int, str], workers: Sequence[str]) -> dict[int, str]:
    """The shadows that can go on with other holders."""
    return {
        stage: shadow
        for stage, shadow in old.shadows.items()
        if shadow in workers and holders[stage] not in (shadow, OWNER)
    }


def _can_stay(old: Assignment, workers: Sequence[str], *, guarded: bool) -> bool:
    """Whether every party with a role stays, and every stage of a worker has a shadow."""
    others = {stage for stage, holder in old.holders.items() if holder != OWNER}
    is_watched = set(old.shadows) == (others if guarded else set())
    return is_watched and {*old.holders.values(), *old.shadows.values()} <= {*workers, OWNER}


def _relieve_shadows(holders: Mapping[int, str], shadows: dict[int, str], field: _BalanceInputs) -> None:
    """Let each worker without a role take the place of a shadow with several, the owner's first, if it has room."""
    for worker in field.workers:
        roles = Counter([*holders.values(), *shadows.values()])
        if roles[worker]:
            continue
        crowded = field.memory.excess_bytes(holders, shadows)
        could = [
            stage for stage in shadows if field.memory.excess_bytes(holders, {**shadows, stage: worker}) <= crowded
        ]
        stage = max(could, key=lambda s: (shadows[s] == OWNER, roles[shadows[s]], -s), default=None)
        if stage is not None and (shadows[stage] == OWNER or roles[shadows[stage]] > 1):
            shadows[stage] = worker


WORTH = 1.5
"""How many times faster the slowest worker's share must get before stages move: they take a step's time to travel."""


class PaceMeter:
    """A measurement of every worker's pace over a number of steps without a change of roles.

    A worker's report counts for nothing but its load: one that lies about its pace gets more or less to do.

    Attributes:
        costs: Work of each stage, in any one unit.
        pace: Seconds that each worker needed for one unit of work when it was measured last.
        every: Steps of one measurement; 0 measures nothing.
    """

    def __init__(self, costs: Sequence[float], every: int) -> None:
        self.costs = costs
        self.pace: dict[str, float] = {}
        self.every = every
        self._begun: tuple[int, Assignment, dict[str, float]] | None = None

    def is_unbalanced(
        self,
        step: int,
        assignment: Assignment,
        workers: Sequence[str],
        busy: Mapping[str, float],
        memory: Memory = UNBOUNDED,
    ) -> bool:
        """Whether stages should move because a worker is slow.

        Args:
            assignment: Holder and shadow of each stage.
            busy: Seconds that each worker has worked since it was started, as it reported last.
        """
        if not self.every or len(workers) < 2:
            return False
        if self._begun is None or self._begun[1] != assignment or step < self._begun[0]:
            self._begun = (step, assignment, dict(busy))
            return False
        since, _, before = self._begun
        if step - since < self.every:
            return False
        self._begun = (step, assignment, dict(busy))
        work = worker_seconds(assignment.holders, workers, self.costs)
        for worker in workers:
            seconds = busy.get(worker, math.nan) - before.get(worker, math.nan)
            if work[worker] and math.isfinite(seconds) and seconds > 0:
                self.pace[worker] = seconds / work[worker]
        guarded = bool(assignment.shadows)
        new = rebalance_assignment(
            assignment, workers, guarded=guarded, costs=self.costs, pace=self.pace, memory=memory
        )
        slowest, then = (
            max(worker_seconds(holders, workers, self.costs, self.pace).values())
            for holders in (assignment.holders, new.holders)
        )
        return slowest > WORTH * then
