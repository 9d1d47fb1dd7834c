"""One rank of a probe: what exchanges take in the midst of computation, by the calls that the engine makes.

A tight loop of exchanges does not show it: both ranks are then awake all the time and come at once. Here a chain of
products is run forward and backward, with exchanges between them and without; no chain is a layout's block. Two sizes
of an exchange stand between equally much computation.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from phalanx.lab.bench.measure.harness import time_turns
from phalanx.lab.bench.parallel.rank_exchange import world_group
from phalanx.lab.bench.parallel.rank_host import Act
from phalanx.parallel import RankEnv, join_ranks
from phalanx.parallel.data.data_parallel import microbatch_scope, shard_module
from phalanx.parallel.groups.collectives import (
    Group,
    copy_to_ranks,
    gather_parts,
    scatter_sum,
    sum_over_ranks,
    swap_parts,
)
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import keep_freed_memory, settle_numerics

_LENGTH = 6
_TIMES = 11
_ROWS = 2
_SEQUENCE = 1
_MICROBATCHES = 8

Run = Callable[[], None]


@dataclass(frozen=True)
class _StreamSizes:
    """Of a chain: between two exchanges there is about as much to do as in a part of a block of some width."""

    hidden: int
    tokens: int

    @property
    def weight_size(self) -> int:
        """Of each of two products."""
        return 8 * self.hidden**2 // 3

    @property
    def exchange_widths(self) -> tuple[int, int]:
        return max(2, self.hidden // 6 * 2), 2 * self.hidden

    @property
    def shared_widths(self) -> tuple[int, int]:
        return max(2, self.hidden // 6 * 2), self.hidden // 3 * 4


@contextlib.contextmanager
def open_stream(body: dict[str, Any], place: RankEnv) -> Iterator[Act]:
    """Time exchanges together with the other rank; see `phalanx.lab.bench.parallel.ranks.ArmRanks`.

    Args:
        body: ``hidden`` and ``tokens``, which say how much there is to do between exchanges.
    """
    sizes = _StreamSizes(int(body["hidden"]), int(body["tokens"]))
    settle_numerics(1)
    keep_freed_memory()
    with join_ranks(place, own_device("cpu", place), "00" * 32):
        yield lambda _: {"streams": _stream_rows(sizes, world_group())}


def _stream_rows(sizes: _StreamSizes, group: Group) -> list[dict[str, Any]]:
    """Time each exchange at two sizes.

    Returns:
        ``op``, ``bytes`` of one exchange, and wall and CPU seconds that one exchange adds to its computation; and for
        ``stage`` the additions of a pipeline to one microbatch in one stage.
    """
    rows = [_inside_row(kind, width, sizes, group) for kind in _INSIDE for width in sizes.exchange_widths]
    rows += [row for width in sizes.shared_widths for row in _shared_rows(width, sizes)]
    return [*rows, *(_send_row(width, sizes, group) for width in sizes.exchange_widths), _stage_row(sizes, group)]


def _sum_exchange(x: Tensor, group: Group) -> Tensor:
    return sum_over_ranks(copy_to_ranks(x, group), group)


def _slices_exchange(x: Tensor, group: Group) -> Tensor:
    return scatter_sum(gather_parts(x, _SEQUENCE, group), _SEQUENCE, group)


def _swap_exchange(x: Tensor, group: Group) -> Tensor:
    """There, as a tensor that is dealt out by head, and back."""
    ranks = group.size()
    dealt = x.reshape(*x.shape[:-1], ranks, -1).permute(2, 0, 1, 3)
    return swap_parts(dealt, group).permute(1, 2, 0, 3).reshape(x.shape)


_INSIDE: tuple[tuple[str, Callable[[Tensor, Group], Tensor], int], ...] = (
    ("sum", _sum_exchange, 2),
    ("slices", _slices_exchange, 4),
    ("swap", _swap_exchange, 2),
)
"""What is exchanged between products, and how often forward and backward together."""


def _inside_row(
    kind: tuple[str, Callable[[Tensor, Group], Tensor], int], width: int, sizes: _StreamSizes, group: Group
) -> dict[str, Any]:
    op, exchange, calls = kind
    weights = [torch.randn(width, sizes.weight_size // width, requires_grad=True) for _ in range(_LENGTH)]
    slices = group.size() if op == "slices" else 1
    x = torch.randn(_ROWS, sizes.tokens // slices, width, requires_grad=True)

    def run(*, exchanges: bool) -> None:
        y = x
        for weight in weights:
            y = functional.relu(y @ weight) @ weight.T
            y = exchange(y, group) if exchanges else y
        torch.autograd.backward(y.sum())

    wall, cpu = _added_seconds(lambda: run(exchanges=True), lambda: run(exchanges=False))
    size = _ROWS * sizes.tokens * width * x.element_size()
    return {"op": op, "bytes": size, "wall_s": wall / (_LENGTH * calls), "cpu_s": cpu / (_LENGTH * calls)}


class _Block(nn.Module):
    """As many parameters as a block of a transformer has, four products and two norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.ins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Add two times a norm and two products to the input."""
        for norm, out, into in zip(self.norms, self.outs, self.ins, strict=True):
            x = x + into(functional.gelu(out(norm(x))))
        return x


def _shared_rows(width: int, sizes: _StreamSizes) -> list[dict[str, Any]]:
    """What sharing a block's gradients, and gathering its parameters, adds to it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # as many operations whatever the width
    x = torch.randn((sizes.shared_widths[-1] // width) ** 2, sizes.tokens, width)
    plain, gradients, parameters = (nn.Sequential(*(_Block(width) for _ in range(_LENGTH))) for _ in range(3))
    size = 4 * sum(parameter.numel() for parameter in plain[0].parameters())
    for model, reshard in ((gradients, False), (parameters, True)):
        for module in (*model, model):
            shard_module(module, mesh, reshard=reshard, policy=OffloadPolicy())

    def run(model: nn.Module, *, keeps_whole: bool = False) -> None:
        with microbatch_scope(model, is_last=False, keeps_whole=keeps_whole):
            torch.autograd.backward(model(x).sum())

    scatter = _added_seconds(lambda: run(gradients, keeps_whole=True), lambda: run(plain))
    round_trips = _added_seconds(lambda: run(parameters), lambda: run(plain))
    # a block's parameters are gathered for its forward and for its backward pass
    gather = [(round_trip - part) / 2 for round_trip, part in zip(round_trips, scatter, strict=True)]
    rows = []
    for op, (wall, cpu) in (("gradients", scatter), ("parameters", gather)):
        rows.append({"op": op, "bytes": size, "wall_s": wall / _LENGTH, "cpu_s": cpu / _LENGTH})
    return rows


def _send_row(width: int, sizes: _StreamSizes, group: Group) -> dict[str, Any]:
    """What passes from a rank that has worked to one that waits for it, there and back in turns."""
    weight, x = torch.randn(width, sizes.weight_size // width), torch.randn(_ROWS * sizes.tokens, width)
    rank, came = group.rank(), torch.empty_like(x)

    def work() -> Tensor:
        return functional.relu(x @ weight) @ weight.T

    def turns() -> None:
        for turn in range(2 * _LENGTH):
            if turn % 2 == rank:
                dist.send(work(), group=group, group_dst=1 - rank)
            else:
                dist.recv(came, group=group, group_src=1 - rank)

    def alone() -> None:
        # the other's work is waited for too
        for _ in range(2 * _LENGTH):
            work()

    wall, cpu = _added_seconds(turns, alone)
    _, send_cpu_s = _added_seconds(alone, lambda: None)
    passes = 2 * _LENGTH
    # half of that work was the other's, and no CPU time of this rank
    return {
        "op": "send",
        "bytes": 4 * x.numel(),
        "wall_s": wall / passes,
        "cpu_s": max(0.0, cpu + send_cpu_s / 2) / passes,
    }


def _stage_row(sizes: _StreamSizes, group: Group) -> dict[str, Any]:
    """What torch's pipeline costs for one microbatch in one stage: its own calls, and messages.

    In CPU seconds alone: the rest of the wall seconds is the bubble.
    """
    width, rank = sizes.shared_widths[-1], group.rank()
    block, x = _Block(width), torch.randn(_ROWS, sizes.tokens, width, requires_grad=True)
    stage = PipelineStage(block, rank, group.size(), torch.device("cpu"), input_args=x, output_args=x, group=group)
    schedule = Schedule1F1B(stage, _MICROBATCHES, lambda y, _: y.sum(), scale_grads=False)
    batch = torch.randn(_ROWS * _MICROBATCHES, sizes.tokens, width)

    def pipeline() -> None:
        is_last = rank == group.size() - 1
        schedule.step(*([] if rank else [batch]), target=batch if is_last else None, return_outputs=False)

    def alone() -> None:
        for _ in range(_MICROBATCHES):
            torch.autograd.backward(block(x).sum())

    _, cpu = _added_seconds(pipeline, alone)
    return {"op": "stage", "bytes": 4 * x.numel(), "wall_s": cpu / _MICROBATCHES, "cpu_s": cpu / _MICROBATCHES}


def _added_seconds(run: Run, bare: Run) -> tuple[float, float]:
    """Median wall and CPU seconds by which one is slower than the other, turn by turn; noise may be below zero."""
    samples = time_turns({"run": run, "bare": bare}, _TIMES, before=lambda _: dist.barrier())
    pairs = list(zip(samples["run"], samples["bare"], strict=True))
    return (
        statistics.median(sample.wall_s - bare_sample.wall_s for sample, bare_sample in pairs),
        statistics.median(sample.cpu_s - bare_sample.cpu_s for sample, bare_sample in pairs),
    )
