"""One rank of `bench collectives`: each operation on tensors of a size, repeated, until the last rank is done."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.errors import TrainingError
from phalanx.lab.bench.parallel.rank_host import Act
from phalanx.parallel import RankEnv, join_ranks
from phalanx.parallel.groups import direct
from phalanx.parallel.groups.rendezvous import own_device

_BYTES_PER_NUMBER = 4
_WARM_UPS = 2

Exchange = Callable[[], None]


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

    Args:
        order: ``op``, ``bytes``, and how often: ``times``.

    Returns:
        Median and least seconds until the last rank was done, and CPU seconds of this rank for one time.
    """
    run = OPERATIONS[order["op"]](order["bytes"] // _BYTES_PER_NUMBER)
    for _ in range(_WARM_UPS):
        run()
    walls: list[float] = []
    cpu = 0.0
    for _ in range(order["times"]):
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        run()
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        cpu += time.process_time() - used
        dist.all_reduce(took, dist.ReduceOp.MAX)
        walls.append(float(took))
    return {"seconds": statistics.median(walls), "best_s": min(walls), "cpu_s": cpu / len(walls)}


def _ones_tensor(count: int) -> Tensor:
    """A tensor that every rank can cut into equal parts."""
    world = dist.get_world_size()
    return torch.ones(max(world, count // world * world))


def _all_reduce(count: int) -> Exchange:
    x = _ones_tensor(count)
    return lambda: _discard_result(dist.all_reduce(x))


def _reduce_scatter(count: int) -> Exchange:
    x = _ones_tensor(count)
    part = x.new_empty(len(x) // dist.get_world_size())
    return lambda: _discard_result(dist.reduce_scatter_tensor(part, x))


def _all_gather(count: int) -> Exchange:
    full = _ones_tensor(count)
    part = full.new_ones(len(full) // dist.get_world_size())
    return lambda: _discard_result(dist.all_gather_into_tensor(full, part))


def _direct_scatter(count: int) -> Exchange:
    x = _ones_tensor(count)
    part = x.new_empty(len(x) // dist.get_world_size())
    return lambda: direct.scatter_sum(part, x, _world_group())


def _direct_gather(count: int) -> Exchange:
    full = _ones_tensor(count)
    part = full.new_ones(len(full) // dist.get_world_size())
    return lambda: direct.gather_whole(full, part, _world_group())


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise TrainingError("bench: the ranks have not met")
    return group


def _all_to_all(count: int) -> Exchange:
    x = _ones_tensor(count)
    y = torch.empty_like(x)
    return lambda: _discard_result(dist.all_to_all_single(y, x))


def _broadcast_exchange(count: int) -> Exchange:
    x = _ones_tensor(count)
    return lambda: _discard_result(dist.broadcast(x, src=0))


def _send_exchange(count: int) -> Exchange:
    """From the first rank to the last; the others have nothing to do."""
    x, last = _ones_tensor(count), dist.get_world_size() - 1
    if dist.get_rank() == 0:
        return lambda: _discard_result(dist.send(x, dst=last))
    return (lambda: _discard_result(dist.recv(x, src=0))) if dist.get_rank() == last else (lambda: None)


def _gather_to_one(count: int) -> Exchange:
    return _sum_at_one(_ones_tensor(count))


def _sum_at_one(x: Tensor) -> Exchange:
    """What a ring avoids: all send to one rank, which adds up and sends the sum to each."""
    world = dist.get_world_size()
    came = [torch.empty_like(x) for _ in range(world - 1)] if dist.get_rank() == 0 else []

    def lead() -> None:
        works = [dist.irecv(received, src=rank) for rank, received in enumerate(came, start=1)]
        for work, received in zip(works, came, strict=True):
            _wait_for(work)
            x.add_(received)
        for work in [dist.isend(x, dst=rank) for rank in range(1, world)]:
            _wait_for(work)

    def follow() -> None:
        dist.send(x, dst=0)
        dist.recv(x, src=0)

    return follow if dist.get_rank() else lead


def _halving_doubling(count: int) -> Exchange:
    return _sum_by_halves(_ones_tensor(count))


def _sum_by_halves(x: Tensor) -> Exchange:
    """An all-reduce in 2 log2(n) rounds: parts are halved with ever nearer partners, then joined the same way back.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    came = torch.empty(len(x) // 2)

    def run() -> None:
        first, size, distance = 0, len(x), world // 2
        halves: list[tuple[int, int, int, int]] = []
        while distance:
            size //= 2
            mine, other = (first + size, first) if rank & distance else (first, first + size)
            part = came[:size]
            _swap_tensors(x[other : other + size], part, rank ^ distance)
            x[mine : mine + size] += part
            halves.append((mine, other, size, distance))
            first, distance = mine, distance // 2
        for mine, other, length, partner in reversed(halves):
            _swap_tensors(x[mine : mine + length], x[other : other + length], rank ^ partner)

    return run


def _swap_tensors(mine: Tensor, theirs: Tensor, peer: int) -> None:
    works = [dist.irecv(theirs, src=peer), dist.isend(mine, dst=peer)]
    for work in works:
        _wait_for(work)


def _all_reduce_direct(count: int) -> Exchange:
    x = _ones_tensor(count)
    return lambda: _discard_result(direct.all_reduce_sum(x, _world_group()))


def _sum_by_parts(x: Tensor) -> Exchange:
    """Sums scattered, then gathered."""
    part = x.new_empty(len(x) // dist.get_world_size())

    def run() -> None:
        direct.scatter_sum(part, x, _world_group())
        direct.gather_whole(x, part, _world_group())

    return run


def _sum_at_once(x: Tensor) -> Exchange:
    """The engine's sum of a tensor that autograd keeps."""
    return lambda: _discard_result(x.copy_(direct.all_reduce_sum(x, _world_group())))


def _wait_for(work: Any) -> None:
    work.wait()


def _discard_result(result: object) -> None:
    """These functions return work only where they are asked not to wait."""
    del result


SUMS: dict[str, Callable[[Tensor], Exchange]] = {
    "all_reduce_halving_doubling": _sum_by_halves,
    "gather_to_one": _sum_at_one,
    "direct parts": _sum_by_parts,
    "all_reduce_direct": _sum_at_once,
}
"""All-reduces of our own; the tensor must be divisible by the ranks, for halves a power of two."""

OPERATIONS: dict[str, Callable[[int], Exchange]] = {
    "all_reduce": _all_reduce,
    "all_reduce_halving_doubling": _halving_doubling,
    "all_reduce_direct": _all_reduce_direct,
    "gather_to_one": _gather_to_one,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_direct": _direct_scatter,
    "all_gather": _all_gather,
    "all_gather_direct": _direct_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast_exchange,
    "send": _send_exchange,
}
"""From a count of numbers to what is timed. Bytes are those of the whole: of the sum, of what was gathered."""
