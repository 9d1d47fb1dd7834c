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
        yield _time_exchange


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


OPERATIONS: dict[str, Callable[[Tensor], Exchange]] = {
    "all_reduce": lambda x: lambda: dist.all_reduce(x),
    "all_reduce_direct": lambda x: lambda: direct.all_reduce_sum(x, world_group()),
    "reduce_scatter": lambda x: partial(dist.reduce_scatter_tensor, _part_of(x), x),
    "reduce_scatter_direct": lambda x: partial(direct.scatter_sum, _part_of(x), x, world_group()),
    "all_gather": lambda x: partial(dist.all_gather_into_tensor, x, _part_of(x)),
    "all_gather_direct": lambda x: partial(direct.gather_whole, x, _part_of(x), world_group()),
    "all_to_all": lambda x: partial(dist.all_to_all_single, torch.empty_like(x), x),
    "broadcast": lambda x: partial(dist.broadcast, x, src=0),
    "send": _send_exchange,
}
"""From a tensor to what is timed. Bytes are those of the whole: of the sum, of what was gathered."""
