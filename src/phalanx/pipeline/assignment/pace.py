"""The pace of each worker, from its own reports of busy time, and whether stages should move for it."""

import math
from collections.abc import Mapping, Sequence

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.assignment.memory import UNBOUNDED, Memory
from phalanx.pipeline.assignment.rebalance import loads, regrouped

WORTH = 1.5
"""How many times faster the slowest worker's share must get before stages move: they take a step's time to travel."""


class Balance:
    """A measurement of every worker's pace over a number of steps without a change of roles.

    A worker's report counts for nothing but its load: one that lies about its pace gets more or less to do.

    Attributes:
        costs: Work of each stage, in any one unit.
        pace: Seconds that each worker needed for one unit of work when it was measured last.

    Args:
        every: Steps of one measurement; 0 measures nothing.
    """

    def __init__(self, costs: Sequence[float], every: int) -> None:
        self.costs = costs
        self.pace: dict[str, float] = {}
        self._every = every
        self._begun: tuple[int, Assignment, dict[str, float]] | None = None

    def is_lopsided(
        self,
        step: int,
        assignment: Assignment,
        workers: Sequence[str],
        busy: Mapping[str, float],
        memory: Memory = UNBOUNDED,
    ) -> bool:
        """Whether stages should move because a worker is slow.

        Args:
            step: The next one.
            assignment: Holder and shadow of each stage.
            workers: Workers that could have stages.
            busy: Seconds that each worker has worked since it was started, as it reported last.
            memory: The parties' room.
        """
        if not self._every or len(workers) < 2:
            return False
        if self._begun is None or self._begun[1] != assignment or step < self._begun[0]:
            self._begun = (step, assignment, dict(busy))
            return False
        since, _, before = self._begun
        if step - since < self._every:
            return False
        self._begun = (step, assignment, dict(busy))
        work = loads(assignment.holders, workers, self.costs)
        for worker in workers:
            seconds = busy.get(worker, math.nan) - before.get(worker, math.nan)
            if work[worker] and math.isfinite(seconds) and seconds > 0:
                self.pace[worker] = seconds / work[worker]
        guarded = bool(assignment.shadows)
        new = regrouped(assignment, workers, guarded=guarded, costs=self.costs, pace=self.pace, memory=memory)
        slowest, then = (
            max(loads(holders, workers, self.costs, self.pace).values())
            for holders in (assignment.holders, new.holders)
        )
        return slowest > WORTH * then
