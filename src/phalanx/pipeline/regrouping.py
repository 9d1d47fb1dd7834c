"""Who holds and shadows what when workers have come or are about to leave: as few stages move as possible."""

from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.recovery import Assignment, cover


def regrouped(old: Assignment, workers: Sequence[str], *, guarded: bool) -> Assignment:
    """Spread the middle stages over the workers that are there, and let idle workers shadow.

    Args:
        old: The present assignment; everybody in it can still send what it holds.
        workers: Who takes part from now on.
        guarded: Whether stages are shadowed at all.
    """
    holders = _spread(old, workers)
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


def _spread(old: Assignment, workers: Sequence[str]) -> dict[int, str]:
    """Middle stages of the owner and of those who leave go to workers, and no worker has two more than another."""
    holders = dict(old.holders)
    if not workers:
        return dict.fromkeys(holders, OWNER)
    middle = [stage for stage in sorted(holders) if 0 < stage < max(holders)]
    loads = Counter({worker: 0 for worker in workers})
    loads.update(holders[stage] for stage in middle if holders[stage] in loads)
    for stage in middle:
        if holders[stage] in loads:
            continue
        shadow = old.shadows.get(stage)
        # a shadow has the state already
        holders[stage] = min(workers, key=lambda worker: (loads[worker], worker != shadow))
        loads[holders[stage]] += 1
    while max(loads.values()) - min(loads.values()) > 1:
        most, least = max(workers, key=loads.__getitem__), min(workers, key=loads.__getitem__)
        mine = [stage for stage in middle if holders[stage] == most]
        moved = max(mine, key=lambda stage: (old.shadows.get(stage) == least, stage))
        holders[moved] = least
        loads.update({most: -1, least: 1})
    return holders


def _relieve(holders: Mapping[int, str], shadows: dict[int, str], workers: Sequence[str]) -> None:
    """Let each worker without a role take the place of a shadow with several, the owner's first."""
    for worker in workers:
        roles = Counter([*holders.values(), *shadows.values()])
        if roles[worker] or not shadows:
            continue
        stage = max(shadows, key=lambda s: (shadows[s] == OWNER, roles[shadows[s]], -s))
        if shadows[stage] == OWNER or roles[shadows[stage]] > 1:
            shadows[stage] = worker
