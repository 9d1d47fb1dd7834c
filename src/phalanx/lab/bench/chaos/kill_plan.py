"""A plan of kills, drawn from a seed: points inside a step for exact kills, times for random ones."""

import random
from typing import Literal, get_args

from phalanx.config import StrictModel

Point = Literal["forward", "backward", "audit", "commit", "checkpoint"]
"""A point at which a worker is killed: while it runs a microbatch forward, or backward; while it recomputes another's
microbatch; after it has committed to the step and before the step is applied; while its stage's state is on its way
into a checkpoint.
"""

POINTS: tuple[Point, ...] = get_args(Point)
_FIRST_STEP = 2
_MAX_TAIL_S = 60.0


class PlannedKill(StrictModel):
    """One planned kill of a worker.

    Attributes:
        worker: Its name; a replacement has the next number.
        step: It dies at the first opportunity from this step on.
        point: Point of the work at which it dies.
        microbatch: Microbatch of the kill, where the point has a choice; None for the first microbatch.
        moment: Delay into the point, as a share of its usual duration.
    """

    worker: str
    step: int
    point: Point
    microbatch: int | None
    moment: float


class KillPlan(StrictModel):
    """All planned kills of one run."""

    kills: tuple[PlannedKill, ...]

    @property
    def last_step(self) -> int:
        """The step of the last kill."""
        return max((kill.step for kill in self.kills), default=0)


def plan_kills(seed: int, count: int, *, workers: int, microbatches: int, gap: int) -> KillPlan:
    """Draw kills; every point comes equally often, in random order.

    Args:
        workers: Workers that a run begins with; replacements are killed in the order in which they were made.
    """
    draw = random.Random(seed)  # noqa: S311 - a plan that can be drawn again, not a secret
    present, kills, points = list(range(1, workers + 1)), list[PlannedKill](), list[Point]()
    for number in range(count):
        if not points:
            points = list(draw.sample(POINTS, len(POINTS)))
        point, place = points.pop(), draw.randrange(workers)
        kills.append(
            PlannedKill(
                worker=f"worker-{present[place]}",
                step=_FIRST_STEP + number * gap + draw.randrange(max(gap - 2, 1)),
                point=point,
                microbatch=draw.randrange(microbatches) if point in ("forward", "backward") else None,
                moment=draw.random(),
            )
        )
        present[place] = workers + number + 1
    return KillPlan(kills=tuple(kills))


def failure_times(seed: int, mean_s: float, count: int) -> list[float]:
    """Times of failures that come independently of each other, seconds from the start of a window of `count * mean_s`.

    Given the number of its events in a window, a Poisson process has them at uniformly drawn times. None comes in the
    window's last moments (half a mean time, at most a minute), so that its cost is seen.
    """
    draw = random.Random(f"{seed} {mean_s}")  # noqa: S311 - the same times for every arm
    latest = count * mean_s - min(mean_s / 2, _MAX_TAIL_S)
    return sorted(draw.uniform(0.0, latest) for _ in range(count))
