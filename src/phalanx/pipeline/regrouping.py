"""Who holds and shadows what when workers have come or are about to leave: as few stages move as possible."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.recovery import Assignment, cover

_ROUNDING = 1e-9


def regrouped(
    old: Assignment,
    workers: Sequence[str],
    *,
    guarded: bool,
    costs: Sequence[float] = (),
    pace: Mapping[str, float] = MappingProxyType({}),
) -> Assignment:
    """Spread the middle stages over the workers that are there, and let idle workers shadow.

    Args:
        old: The present assignment; everybody in it can still send what it holds.
        workers: Who takes part from now on.
        guarded: Whether stages are shadowed at all.
        costs: Work of each stage; left out, each is as much as another.
        pace: Time that a worker needs for a unit of work; who is left out is as fast as the mean of the others.
    """
    holders = _spread(old, workers, costs, pace)
    if not guarded:
        return Assignment(holders, {}, old.lanes)
    kept = {
        stage: shadow
        for stage, shadow in old.shadows.items()
        if shadow in workers and holders[stage] not in (shadow, OWNER)
    }
    shadows = cover(holders, kept, workers)
    _relieve(holders, shadows, workers)
    return Assignment(holders, shadows, old.lanes)


def loads(
    holders: Mapping[int, str],
    workers: Sequence[str],
    costs: Sequence[float] = (),
    pace: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Time that each worker needs for what it holds."""
    known = [pace[worker] for worker in workers if worker in pace]
    usual = sum(known) / len(known) if known else 1.0
    return {
        worker: pace.get(worker, usual) * sum(_cost(costs, stage) for stage, who in holders.items() if who == worker)
        for worker in workers
    }


def _spread(
    old: Assignment, workers: Sequence[str], costs: Sequence[float], pace: Mapping[str, float]
) -> dict[int, str]:
    """Middle stages of the owner and of those who leave go to workers; then none moves that would not help."""
    holders = dict(old.holders)
    if not workers:
        return dict.fromkeys(holders, OWNER)
    middle = [stage for stage in sorted(holders) if 0 < stage < max(holders)]
    for stage in [stage for stage in middle if holders[stage] not in workers]:
        # a shadow has the state already
        ranks = {worker: loads({**holders, stage: worker}, workers, costs, pace)[worker] for worker in workers}
        holders[stage] = min(workers, key=lambda worker: (ranks[worker], worker != old.shadows.get(stage)))
    while (moved := _best_move(holders, old, workers, costs, pace)) is not None:
        holders[moved[0]] = moved[1]
    return holders


def _best_move(
    holders: Mapping[int, str],
    old: Assignment,
    workers: Sequence[str],
    costs: Sequence[float],
    pace: Mapping[str, float],
) -> tuple[int, str] | None:
    """A stage of the slowest worker and who would be done with it soonest; None when nobody would be sooner."""
    before = loads(holders, workers, costs, pace)
    slowest = max(workers, key=before.__getitem__)
    mine = [stage for stage, who in holders.items() if who == slowest]
    moves = [(stage, worker) for stage in mine for worker in workers if worker != slowest]
    after = {
        (stage, worker): loads({**holders, stage: worker}, workers, costs, pace)[worker] for stage, worker in moves
    }
    best = min(moves, key=lambda move: (after[move], old.shadows.get(move[0]) != move[1], -move[0]), default=None)
    return best if best is not None and after[best] < before[slowest] * (1 - _ROUNDING) else None


def _cost(costs: Sequence[float], stage: int) -> float:
    return costs[stage] if costs else 1.0


def _relieve(holders: Mapping[int, str], shadows: dict[int, str], workers: Sequence[str]) -> None:
    """Let each worker without a role take the place of a shadow with several, the owner's first."""
    for worker in workers:
        roles = Counter([*holders.values(), *shadows.values()])
        if roles[worker] or not shadows:
            continue
        stage = max(shadows, key=lambda s: (shadows[s] == OWNER, roles[shadows[s]], -s))
        if shadows[stage] == OWNER or roles[shadows[stage]] > 1:
            shadows[stage] = worker
