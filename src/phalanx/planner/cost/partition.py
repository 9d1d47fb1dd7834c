"""Layers to stages: even ones for equal ranks, uneven ones for pools of different devices and for measured parties."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations

Fits = Callable[[int, int, int], bool]
"""Whether a stage fits: its index, its first layer and the one after its last."""


def balanced_layers(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return layers per stage for equal ranks, so that the slowest stage is as fast as can be."""
    partition = uneven_layers(costs, [1.0] * num_stages)
    if partition is None:
        raise ValueError(f"partition: {len(costs)} layers for {num_stages} stages; lower the stages")
    return partition


def uneven_layers(costs: Sequence[float], speeds: Sequence[float], fits: Fits | None = None) -> tuple[int, ...] | None:
    """Return layers per stage, so that the slowest stage is as fast as can be.

    Args:
        costs: Work of each layer, in any one unit.
        speeds: Work that the rank of each stage does in a second, in the order of the pipeline.
        fits: Tells which stages fit into their rank's memory; None: all do.

    Returns:
        At least one layer each, contiguous; of equally fast ones the most even in seconds. None when nothing fits.
    """
    num_layers, num_stages = len(costs), len(speeds)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    # best[stage, end] is the slowest stage, then the sum of squares, of the first stages over the first layers
    @cache
    def best(stage: int, end: int) -> tuple[float, float, int] | None:
        shortest: tuple[float, float, int] | None = None
        for first in range(stage, end) if stage else range(1):
            if end <= first or (fits is not None and not fits(stage, first, end)):
                continue
            before = best(stage - 1, first) if stage else (0.0, 0.0, 0)
            if before is None:
                continue
            seconds = (sums[end] - sums[first]) / speeds[stage]
            option = (max(before[0], seconds), before[1] + seconds**2, first)
            if shortest is None or option[:2] < shortest[:2]:
                shortest = option
        return shortest

    if num_layers < num_stages or best(num_stages - 1, num_layers) is None:
        return None
    ends = [num_layers]
    for stage in range(num_stages - 1, 0, -1):
        place = best(stage, ends[-1])
        ends.append(place[2] if place is not None else 0)
    ends.append(0)
    ends.reverse()
    return tuple(stop - first for first, stop in pairwise(ends))


MAX_PLACES = 120
"""Orders of a pool that are all tried; beyond, ranks stand in the order of their memory."""


def rank_placements(kinds: Sequence[str], memory: Callable[[str], float]) -> list[tuple[str, ...]]:
    """Return the orders in which a pool's ranks can stand in a pipeline, equal devices not told apart.

    Args:
        memory: Bytes of a device; where there are too many orders only the one with the most memory first is
            returned, because the first stages of 1F1B hold the most microbatches.
    """
    if _num_orders(kinds) > MAX_PLACES:
        return [tuple(sorted(kinds, key=lambda kind: (-memory(kind), kind)))]
    return _distinct_orders(tuple(sorted(kinds)))


def _num_orders(kinds: Sequence[str]) -> int:
    number = math.factorial(len(kinds))
    for kind in set(kinds):
        number //= math.factorial(list(kinds).count(kind))
    return number


def _distinct_orders(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    if len(set(kinds)) == len(kinds):
        return list(permutations(kinds))
    if not kinds:
        return [()]
    orders = []
    for kind in sorted(set(kinds)):
        rest = list(kinds)
        rest.remove(kind)
        orders += [(kind, *others) for others in _distinct_orders(tuple(rest))]
    return orders


@dataclass(frozen=True)
class MeasuredParties:
    """The parties of a run that goes on.

    Attributes:
        owner_s: Seconds of a step that the owner needs for a layer.
        worker_s: The same of each worker that is left, in the order of the stages.
        edge_work: Work of embedding and head, which the owner does, in layers.
    """

    owner_s: float
    worker_s: Mapping[str, float]
    edge_work: float

    def slowest_seconds(self, owned: int, layers: Sequence[int]) -> float:
        """Return when the slowest party is done, with so many layers at the owner and at each worker."""
        workers = (count * seconds for count, seconds in zip(layers, self.worker_s.values(), strict=True))
        return max((owned + self.edge_work) * self.owner_s, *workers)


def propose_layers(num_layers: int, parties: MeasuredParties) -> tuple[int, ...] | None:
    """Return the layers of each stage: the owner's first and last, and one for each worker between them.

    Returns:
        Of equally fast cuts the one with fewest layers at the owner. None where a party would have no layer.
    """
    speeds = [1 / seconds for seconds in parties.worker_s.values()]
    cuts = []
    for owned in range(2, num_layers - len(speeds) + 1):
        middle = uneven_layers([1.0] * (num_layers - owned), speeds) if speeds else None
        if middle is not None:
            cuts.append((parties.slowest_seconds(owned, middle), owned, middle))
    if not cuts:
        return None
    _, owned, middle = min(cuts)
    return (owned - owned // 2, *middle, owned // 2)
