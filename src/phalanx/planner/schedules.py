"""The table of pipeline schedules: each as pure data, the order in which a rank works.

Verified stages, the ranks of a domain and the planner read it; it needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.errors import ConfigError

Kind = Literal["forward", "backward", "inputs", "weights"]

Direction = Literal["forward", "backward"]


class Work(NamedTuple):
    """One microbatch through one stage.

    Attributes:
        kind: ``backward`` is ``inputs`` (the gradient that the stage before waits for) and ``weights`` together.
        stage: Number among all stages of the pipeline; rank ``stage % ranks`` has it.
    """

    kind: Kind
    stage: int
    microbatch: int


Order = tuple[Work, ...]


class Action(NamedTuple):
    """Run one microbatch through a verified stage in one direction."""

    direction: Direction
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """One line of the table.

    Attributes:
        order: One rank's, from its number, the ranks, the microbatches and the stages of each rank.
        torch_class: The schedule in ``torch.distributed.pipelining`` that works alike, by which ranks run it.
        chunks: Stages of each rank, unless a layout says otherwise.
        splits_backward: Whether gradients of inputs and of weights are computed apart.
        fills_first: Whether all forwards come before all backwards, so that every microbatch is held at once.
    """

    order: Callable[[int, int, int, int], Order]
    torch_class: str
    chunks: int = 1
    splits_backward: bool = False
    fills_first: bool = False

    @property
    def is_verifiable(self) -> bool:
        """Whether stages in other hands can work in it: one stage a party, and each backward whole."""
        return self.chunks == 1 and not self.splits_backward


def rank_orders(schedule: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> tuple[Order, ...]:
    """Return the order of every rank.

    Args:
        schedule: One of `SCHEDULES`.
        num_microbatches: Microbatches of each rank; with several stages a rank a multiple of `num_ranks`.
        chunks: Stages of each rank; only the interleaved schedules have several.
    """
    return tuple(SCHEDULES[schedule].order(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks))


def max_in_flight(order: Order) -> int:
    """Return how many microbatches a rank holds at once, over all its stages; weights let go of them."""
    num_held = max_held = 0
    for work in order:
        num_held += {"forward": 1, "backward": -1, "inputs": 0, "weights": -1}[work.kind]
        max_held = max(max_held, num_held)
    return max_held


def _order_gpipe(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> Order:
    """All forwards, then all backwards, in ascending order, so that gradients add up alike in every schedule.

    Source: Huang et al. 2019, section 2.3.
    """
    del num_ranks, chunks
    forwards = [Work("forward", rank, m) for m in range(num_microbatches)]
    return (*forwards, *(Work("backward", rank, m) for m in range(num_microbatches)))


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> Order:
    """After a warm-up each forward follows a backward; at most ``num_ranks - rank`` microbatches are held.

    Source: Narayanan et al. 2019 (PipeDream), section 3.2; Narayanan et al. 2021, section 2.2.1.
    """
    del chunks
    warmup = min(num_microbatches, num_ranks - rank)
    order = [Work("forward", rank, m) for m in range(warmup)]
    for m in range(num_microbatches):
        order.append(Work("backward", rank, m))
        if warmup + m < num_microbatches:
            order.append(Work("forward", rank, warmup + m))
    return tuple(order)


def _order_interleaved(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> Order:
    """1F1B over several stages of each rank. Source: Narayanan et al. 2021, section 2.2.2."""
    total = num_microbatches * chunks
    warmup = min(total, 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks)
    order = [_looped_work("forward", index, rank, num_ranks, chunks) for index in range(warmup)]
    for index in range(total):
        if warmup + index < total:
            order.append(_looped_work("forward", warmup + index, rank, num_ranks, chunks))
        order.append(_looped_work("backward", index, rank, num_ranks, chunks))
    return tuple(order)


def _order_zero_bubble(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> Order:
    """1F1B with the weights' gradients put off, so that they fill the idle time; no more is held than in 1F1B.

    A rank of several stages begins its backward passes half as many forward passes earlier than in interleaved 1F1B.

    Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 2.1, schedule H1.
    """
    total = num_microbatches * chunks
    warmup = min(total, num_ranks - rank - 1 + (chunks - 1) * num_ranks)
    order = [_looped_work("forward", index, rank, num_ranks, chunks) for index in range(warmup)]
    for index in range(total):
        if warmup + index < total:
            order.append(_looped_work("forward", warmup + index, rank, num_ranks, chunks))
        order.append(_looped_work("inputs", index, rank, num_ranks, chunks))
        if index >= rank:
            order.append(_looped_work("weights", index - rank, rank, num_ranks, chunks))
    late = range(max(0, total - rank), total)
    return (*order, *(_looped_work("weights", index, rank, num_ranks, chunks) for index in late))


def _looped_work(kind: Kind, index: int, rank: int, num_ranks: int, chunks: int) -> Work:
    """Return the work of a kind that a rank does as its `index`-th, in turns of as many microbatches as ranks."""
    turn, place = divmod(index, num_ranks * chunks)
    chunk, offset = divmod(place, num_ranks)
    chunk = chunk if kind == "forward" else chunks - 1 - chunk
    return Work(kind, chunk * num_ranks + rank, turn * num_ranks + offset)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(_order_gpipe, "ScheduleGPipe", fills_first=True),
    "1f1b": Schedule(_one_f_one_b, "Schedule1F1B"),
    "interleaved": Schedule(_order_interleaved, "ScheduleInterleaved1F1B", chunks=2),
    "zero-bubble": Schedule(_order_zero_bubble, "ScheduleInterleavedZeroBubble", splits_backward=True),
    "interleaved-zero-bubble": Schedule(
        _order_zero_bubble, "ScheduleInterleavedZeroBubble", chunks=2, splits_backward=True
    ),
}


def verifiable_schedules() -> tuple[str, ...]:
    """The names of those in which stages in other hands can work."""
    return tuple(name for name, schedule in SCHEDULES.items() if schedule.is_verifiable)


def stage_actions(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the order of one verified stage's work."""
    entry = SCHEDULES[schedule]
    if not entry.is_verifiable:
        raise ConfigError(f"pipeline.schedule: {schedule!r} is not one of whole stages and whole backwards")
    order = entry.order(stage, num_stages, num_microbatches, 1)
    return tuple(Action("forward" if work.kind == "forward" else "backward", work.microbatch) for work in order)
