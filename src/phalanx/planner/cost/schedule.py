"""A schedule played through on paper: when each stage works, and when it waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.planner.schedules import Kind, Order, Work, rank_orders


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one microbatch takes in one stage.

    Attributes:
        inputs: Backward pass down to the inputs.
    """

    forward: float
    inputs: float
    weights: float

    def seconds_of(self, kind: Kind) -> float:
        """Seconds of one kind of work."""
        if kind == "backward":
            return self.inputs + self.weights
        return {"forward": self.forward, "inputs": self.inputs, "weights": self.weights}[kind]


@dataclass(frozen=True)
class Slot:
    """A piece of work and its time in seconds from the beginning of the step."""

    rank: int
    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline."""

    slots: tuple[Slot, ...]
    num_ranks: int

    @property
    def length_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(slot.end for slot in self.slots)

    @property
    def busy_s(self) -> float:
        """Seconds of work, all ranks together."""
        return sum(slot.end - slot.start for slot in self.slots)

    @property
    def bubble_share(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1.0 - self.busy_s / (self.num_ranks * self.length_s)


def simulate_step(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    times: Sequence[StageTimes],
    latency_s: float = 0.0,
    transfer_s: float = 0.0,
) -> Timeline:
    """Play one step through.

    Args:
        schedule: One of ``layout.SCHEDULES``.
        times: One entry per stage; a multiple of `num_ranks`.
        latency_s: Seconds from the end of sending until the next stage has the result.
        transfer_s: Seconds that sending one result occupies the link; the rank goes on working.
    """
    every = rank_orders(schedule, num_ranks, num_microbatches, len(times) // num_ranks)
    return play_orders(every, times, latency_s, transfer_s)


def play_orders(
    every: Sequence[Order], times: Sequence[StageTimes], latency_s: float = 0.0, transfer_s: float = 0.0
) -> Timeline:
    """Play the orders of all ranks through: each does its next piece of work as soon as its inputs are there."""
    ended: dict[Work, float] = {}
    arrived: dict[Work, float] = {}
    links: dict[tuple[int, bool], float] = {}
    slots: list[list[Slot]] = [[] for _ in every]
    clocks = [0.0] * len(every)
    remaining = sum(len(order) for order in every)
    while remaining:
        before = remaining
        for rank, order in enumerate(every):
            while len(slots[rank]) < len(order):
                work = order[len(slots[rank])]
                ready = _ready_time(work, ended, arrived, len(times))
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                stop = start + times[work.stage].seconds_of(work.kind)
                slots[rank].append(Slot(rank, work, start, stop))
                ended[work] = clocks[rank] = stop
                link = (work.stage, work.kind == "forward")
                if work.kind != "weights":
                    links[link] = max(stop, links.get(link, 0.0)) + transfer_s
                    arrived[work] = links[link] + latency_s
                remaining -= 1
        if remaining == before:
            raise ValueError(f"schedule: {remaining} pieces of work wait for each other")
    return Timeline(tuple(slot for row in slots for slot in row), len(every))


def bubble_formula(num_ranks: int, num_microbatches: int, chunks: int = 1) -> float:
    """Idle share of GPipe, 1F1B and interleaved 1F1B for equal stages and links without delay.

    Source: Narayanan et al. 2021, section 2.2, as a share of the whole step.
    """
    return (num_ranks - 1) / (chunks * num_microbatches + num_ranks - 1)


def _ready_time(work: Work, ended: dict[Work, float], arrived: dict[Work, float], num_stages: int) -> float | None:
    """Return when everything is there that a piece of work needs; None when something has not been done yet."""
    stage, microbatch = work.stage, work.microbatch
    if work.kind == "forward":
        return arrived.get(Work("forward", stage - 1, microbatch)) if stage else 0.0
    if work.kind == "weights":
        return ended.get(Work("inputs", stage, microbatch))
    forward_end = ended.get(Work("forward", stage, microbatch))
    if forward_end is None or stage == num_stages - 1:
        return forward_end
    behind = arrived.get(Work("backward", stage + 1, microbatch), arrived.get(Work("inputs", stage + 1, microbatch)))
    return None if behind is None else max(forward_end, behind)
