"""One rank of `bench collectives`: each operation on tensors of a size, repeated, until the last rank is done."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import time_call
from phalanx.lab.bench.parallel.rank_host import Act
from phalanx.parallel import RankEnv, join_ranks
from phalanx.parallel.groups import direct
from phalanx.parallel.groups.rendezvous import own_device

_BYTES_PER_NUMBER = 4
_WARM_UPS = 2

Exchange = Callable[[], object]


@contextlib.contextmanager
def open_exchange(body: dict[str, Any], place: RankEnv) -> Iterator[Act]:
    """Join the others and time the requested exchanges; see `phalanx.lab.bench.parallel.ranks.ArmRanks`."""
    del body
    torch.set_num_threads(1)
    with join_ranks(place, own_device("cpu", place), "00" * 32):
        yield lambda order: _check_all_reduce(order) if "check" in order else _time_exchange(order)


def _check_all_reduce(order: dict[str, Any]) -> dict[str, Any]:
    """Sum different numbers by one of the own all-reduces, and see how far off the worst one is."""
    x = torch.arange(order["numbers"], dtype=torch.float32) * (dist.get_rank() + 1)
    expected = x.clone()
    dist.all_reduce(expected)
    SUMS[order["check"]](x)()
    return {"worst": float((x - expected).abs().max())}


def _time_exchange(order: dict[str, Any]) -> dict[str, Any]:
    """Time one operation.

    Returns:
        Median and least seconds until the last rank was done, and CPU seconds of this rank for one time.
    """
    world, count = dist.get_world_size(), order["bytes"] // _BYTES_PER_NUMBER
    # every rank can cut it into equal parts
    run = OPERATIONS[order["op"]](torch.ones(max(world, count // world * world)))
    for _ in range(_WARM_UPS):
        run()
    walls: list[float] = []
    cpu = 0.0
    for _ in range(order["times"]):
        dist.barrier()
        sample = time_call(run)
        took = torch.tensor([sample.wall_s], dtype=torch.float64)
        cpu += sample.cpu_s
        dist.all_reduce(took, dist.ReduceOp.MAX)
        walls.append(float(took))
    return {"seconds": statistics.median(walls), "best_s": min(walls), "cpu_s": cpu / len(walls)}


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise TrainingError("bench: the ranks have not met")
    return group


def _part_of(x: Tensor) -> Tensor:
    return x.new_ones(len(x) // dist.get_world_size())


def _send_exchange(x: Tensor) -> Exchange:
    """From the first rank to the last; the others have nothing to do."""
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        return lambda: dist.send(x, dst=last)
    return (lambda: dist.recv(x, src=0)) if dist.get_rank() == last else (lambda: None)


def _sum_at_one(x: Tensor) -> Exchange:
    """What a ring avoids: all send to one rank, which adds up and sends the sum to each."""
    world = dist.get_world_size()
    came = [torch.empty_like(x) for _ in range(world - 1)] if dist.get_rank() == 0 else []

    def lead() -> None:
        works = [dist.irecv(received, src=rank) for rank, received in enumerate(came, start=1)]
        for work, received in zip(works, came, strict=True):
            _wait_for(work)
            x.add_(received)
        _wait_for(*[dist.isend(x, dst=rank) for rank in range(1, world)])

    def follow() -> None:
        dist.send(x, dst=0)
        dist.recv(x, src=0)

    return follow if dist.get_rank() else lead


def _sum_by_halves(x: Tensor) -> Exchange:
    """An all-reduce in 2 log2(n) rounds: parts are halved with ever nearer partners, then joined the same way back.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    came = torch.empty(len(x) // 2)

    def swap(mine: Tensor, theirs: Tensor, peer: int) -> None:
        _wait_for(dist.irecv(theirs, src=peer), dist.isend(mine, dst=peer))

    def run() -> None:
        first, size, distance = 0, len(x), world // 2
        halves: list[tuple[int, int, int, int]] = []
        while distance:
            size //= 2
            mine, other = (first + size, first) if rank & distance else (first, first + size)
            part = came[:size]
            swap(x[other : other + size], part, rank ^ distance)
            x[mine : mine + size] += part
            halves.append((mine, other, size, distance))
            first, distance = mine, distance // 2
        for mine, other, length, partner in reversed(halves):
            swap(x[mine : mine + length], x[other : other + length], rank ^ partner)

    return run


def _sum_by_parts(x: Tensor) -> Exchange:
    """Sums scattered, then gathered."""
    part = _part_of(x)

    def run() -> None:
        direct.scatter_sum(part, x, world_group())
        direct.gather_whole(x, part, world_group())

    return run


def _wait_for(*works: Any) -> None:
    for work in works:
        work.wait()


SUMS: dict[str, Callable[[Tensor], Exchange]] = {
    "all_reduce_halving_doubling": _sum_by_halves,
    "gather_to_one": _sum_at_one,
    "direct parts": _sum_by_parts,
    # the engine's sum of a tensor that autograd keeps
    "all_reduce_direct": lambda x: lambda: x.copy_(direct.all_reduce_sum(x, world_group())),
}
"""All-reduces of our own; the tensor must be divisible by the ranks, for halves a power of two."""

OPERATIONS: dict[str, Callable[[Tensor], Exchange]] = {
    "all_reduce": lambda x: lambda: dist.all_reduce(x),
    "all_reduce_halving_doubling": _sum_by_halves,
    "all_reduce_direct": lambda x: lambda: direct.all_reduce_sum(x, world_group()),
    "gather_to_one": _sum_at_one,
    "reduce_scatter": lambda x: partial(dist.reduce_scatter_tensor, _part_of(x), x),
    "reduce_scatter_direct": lambda x: partial(direct.scatter_sum, _part_of(x), x, world_group()),
    "all_gather": lambda x: partial(dist.all_gather_into_tensor, x, _part_of(x)),
    "all_gather_direct": lambda x: partial(direct.gather_whole, x, _part_of(x), world_group()),
    "all_to_all": lambda x: partial(dist.all_to_all_single, torch.empty_like(x), x),
    "broadcast": lambda x: partial(dist.broadcast, x, src=0),
    "send": _send_exchange,
}
"""From a tensor to what is timed. Bytes are those of the whole: of the sum, of what was gathered."""
