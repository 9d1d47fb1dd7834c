"""Traces of spot machines, drawn from a seed with the rates and group sizes of published ones."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

HOUR_S = 3600.0

_P3_GROUPS = {1: 0.49, 2: 0.16, 3: 0.19, 4: 0.09, 5: 0.02, 6: 0.05}
_GCP_GROUPS = {1: 0.89, 2: 0.09, 4: 0.02}
_P3_RETURN_S, _GCP_RETURN_S = 2000.0, 4200.0
"""Mean time until a machine is replaced, which gives the mean size of the published pools, 24 of 32 and 22 of 30."""


@dataclass(frozen=True)
class SpotShape:
    """The shape of a published trace; machines are taken in groups, and each comes back by itself.

    Attributes:
        hourly_share: Share of the machines that is taken in an hour.
        groups: Chance of each number of machines that are taken at one time, of the published pool.
        pool: Machines of the published pool, in the mean.
        return_s: Mean time until one machine comes in the place of one that was taken.
        source: Where the rates are published; no line of a published trace is used.
    """

    hourly_share: float
    groups: Mapping[int, float]
    pool: int
    return_s: float
    source: str

    @property
    def gap_s(self) -> float:
        """Mean time between two preemptions in the published pool."""
        return HOUR_S * sum(n * chance for n, chance in self.groups.items()) / (self.hourly_share * self.pool)

    def life_s(self, machines: int) -> float:
        """Mean time until the first of so many machines is taken, were each taken by itself."""
        return HOUR_S / (self.hourly_share * max(machines, 1))


_BAMBOO = "Bamboo (NSDI 2023): segments with so many preemptions an hour; groups of the EC2 P3 trace"
_OOBLECK = "simulator of Oobleck (SOSP 2023)"
SPOT_SHAPES: Mapping[str, SpotShape] = {
    "bamboo-10": SpotShape(0.10, _P3_GROUPS, 24, _P3_RETURN_S, _BAMBOO),
    "bamboo-16": SpotShape(0.16, _P3_GROUPS, 24, _P3_RETURN_S, _BAMBOO),
    "bamboo-33": SpotShape(0.33, _P3_GROUPS, 24, _P3_RETURN_S, _BAMBOO),
    "oobleck-p3": SpotShape(0.61, _P3_GROUPS, 24, _P3_RETURN_S, f"{_OOBLECK}: p3-trace, 167 of 24 in 11.4 h"),
    "oobleck-gcp": SpotShape(0.30, _GCP_GROUPS, 22, _GCP_RETURN_S, f"{_OOBLECK}: gcp-trace, 72 of 22 in 10.6 h"),
}
"""By name: what is taken of which published trace."""


@dataclass(frozen=True)
class SpotEvent:
    """Machines that are taken at once, or one that comes.

    Attributes:
        at_s: Seconds from the beginning of the trace.
    """

    at_s: float
    kind: Literal["taken", "came"]
    machines: tuple[str, ...]


def draw_trace(shape: SpotShape, pool: int, hours: float, seed: int) -> list[SpotEvent]:
    """Draw a trace of a pool that begins whole; every machine that comes has a name of its own.

    The pool is a part of the published one, or has as many machines: each preemption takes a group of all places by
    chance, and of the pool what is in its own places. So a machine is taken as often as published, and several of a
    small pool go at once more seldom than of a large one. Preemptions are a Poisson process, a return is exponential.
    """
    draw = random.Random(seed)  # noqa: S311 - a trace that can be drawn again, not a secret
    places = {place: f"worker-{place + 1}" for place in range(pool)}
    num_named, end_s, events, returns = pool, hours * HOUR_S, list[SpotEvent](), dict[int, float]()
    next_s = draw.expovariate(1.0 / shape.gap_s)
    while True:
        place = min(returns, key=returns.__getitem__, default=-1)
        if min(next_s, returns.get(place, end_s)) >= end_s:
            return events
        if place in returns and returns[place] <= next_s:
            num_named += 1
            places[place] = f"worker-{num_named}"
            events.append(SpotEvent(returns.pop(place), "came", (places[place],)))
            continue
        size = draw.choices([*shape.groups], [*shape.groups.values()])[0]
        hit = draw.sample(range(max(shape.pool, pool)), size)
        gone = {place: places.pop(place) for place in hit if place in places}
        returns |= {place: next_s + draw.expovariate(1.0 / shape.return_s) for place in gone}
        if gone:
            events.append(SpotEvent(next_s, "taken", tuple(gone.values())))
        next_s += draw.expovariate(1.0 / shape.gap_s)
