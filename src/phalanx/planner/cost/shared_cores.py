"""A schedule played through where its ranks have fewer cores than they are: those at work get equal shares."""

from collections.abc import Mapping, Sequence

from phalanx.planner.cost.schedule import Slot, StageTimes, Timeline
from phalanx.planner.schedules import Kind, Order, Work


def play_sharing(every: Sequence[Order], times: Sequence[StageTimes], cores: float, latency_s: float = 0.0) -> Timeline:
    """Play the orders of all ranks through; a rank that waits for another one leaves its core to those at work.

    Args:
        every: The order of each rank.
        times: Seconds of each stage's work on a core of its own.
        cores: Number of ranks that go at full speed at once; more than that each get an equal share.
        latency_s: Seconds from the end of a piece of work until the next stage has its result, whatever the cores do.

    Raises:
        ValueError: The orders wait for each other.
    """
    waiting = [list(order) for order in every]
    began: list[float] = [0.0] * len(every)
    remaining: list[float | None] = [None] * len(every)
    ended: dict[Work, float] = {}
    slots: list[Slot] = []
    now = 0.0
    while any(waiting):
        starts: list[float] = []
        for rank, order in enumerate(waiting):
            ready = _inputs_ready(order[0], ended, len(times), latency_s) if order and remaining[rank] is None else None
            if ready is not None and ready <= now:
                began[rank], remaining[rank] = now, times[order[0].stage].of(order[0].kind)
            elif ready is not None:
                starts.append(ready)
        at_work = [seconds for seconds in remaining if seconds is not None]
        if not at_work and not starts:
            raise ValueError(f"schedule: {sum(map(len, waiting))} pieces of work wait for each other")
        speed = min(1.0, cores / len(at_work)) if at_work else 1.0
        ends = [now + seconds / speed for seconds in at_work]
        then = min([*ends, *starts])
        for rank, seconds in enumerate(remaining):
            if seconds is None:
                continue
            remaining[rank] = rest = seconds - (then - now) * speed
            # what is left of a rounding is none
            if rest <= 1e-12 * max(1.0, then):
                work = waiting[rank].pop(0)
                slots.append(Slot(rank, work, began[rank], then))
                ended[work] = then
                remaining[rank] = None
        now = then
    return Timeline(tuple(sorted(slots, key=lambda slot: (slot.rank, slot.start))), len(every))


def _inputs_ready(work: Work, ended: Mapping[Work, float], num_stages: int, latency_s: float) -> float | None:
    """Return the time when all inputs of a piece of work are there; None while one is not computed."""
    needs: list[tuple[tuple[Kind, ...], int]] = []
    if work.kind == "forward":
        needs += [(("forward",), work.stage - 1)] if work.stage else []
    elif work.kind == "weights":
        needs.append((("inputs",), work.stage))
    else:
        needs.append((("forward",), work.stage))
        needs += [(("backward", "inputs"), work.stage + 1)] if work.stage < num_stages - 1 else []
    latest = 0.0
    for kinds, stage in needs:
        ends = [ended[done] for kind in kinds if (done := Work(kind, stage, work.microbatch)) in ended]
        if not ends:
            return None
        latest = max(latest, *ends, ends[0] + (latency_s if stage != work.stage else 0.0))
    return latest
