"""This machine as a cluster of the planner, measured on ranks that know of no layout."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from phalanx.lab.bench.parallel.collectives import exchange_rows
from phalanx.lab.bench.parallel.layouts import with_layout
from phalanx.lab.bench.parallel.rank_training import TrainingSpec
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.parallel import ParallelConfig
from phalanx.planner.cluster.hardware import GIB, Cluster, Device, Pool
from phalanx.planner.cluster.links import Link, fit_latency_and_cost, fit_link
from phalanx.planner.cluster.local import core_flops
from phalanx.planner.cluster.machine import Exchange, Shares
from phalanx.planner.model.compute import Flops, forward_flops
from phalanx.planner.model.read import shape_of
from phalanx.planner.model.shape import ModelShape
from phalanx.train import PipelineRun

_ROWS = (1, 4)
_LINK_SIZES = (16 * 1024, 256 * 1024, 2 * 1024**2, 8 * 1024**2)
_MIN_S, _MIN_EXCHANGE_S = 1e-9, 1e-6
_STAGE = "stage"
_PARTS = ("timed", "update", "norms", "shares")
_UPDATE_BYTES = 28
"""Of an fp32 parameter that AdamW reads and writes: weight and moments both ways, and the gradient."""


@dataclass(frozen=True)
class Probe:
    """The timings of a probe.

    Attributes:
        timed: See `phalanx.lab.bench.parallel.rank_probe`; one list for each core.
        norms: A number's way through a norm and a sum, likewise.
        shares: Seconds of a block's passes, likewise.
        exchanges: Rows as `bench collectives` has them, between two ranks.
        streams: Rows of `phalanx.lab.bench.parallel.rank_stream`, likewise; none on a machine of one core.
        peak_flops_per_s: The best product of one core.
    """

    timed: Sequence[Sequence[Mapping[str, Any]]]
    update: Sequence[Mapping[str, float]]
    norms: Sequence[Mapping[str, float]]
    shares: Sequence[Mapping[str, float]]
    exchanges: Sequence[Mapping[str, Any]]
    streams: Sequence[Mapping[str, Any]]
    peak_flops_per_s: float


def probe_machine(host: RankForkServer, run: PipelineRun, cache: Path) -> Probe:
    """Time one rank's work on every core at once, and exchanges between two ranks."""
    cores = len(os.sched_getaffinity(0))
    spec = TrainingSpec(arm="", run=with_layout(run, ParallelConfig()), cache=str(cache.resolve()))
    with host.make_crew("probe", "probe", cores, {"spec": spec.model_dump_json()}) as crew:
        answers = crew.ask_all(rows=list(_ROWS))
    rows = exchange_rows(host, 2, _LINK_SIZES, ("all_reduce", "reduce_scatter_direct"))
    timed, update, norms, shares = ([answer[key] for answer in answers] for key in _PARTS)
    return Probe(timed, update, norms, shares, rows, stream_rows(host, run), core_flops(cores))


def stream_rows(host: RankForkServer, run: PipelineRun) -> list[dict[str, Any]]:
    """Time exchanges of two ranks in the midst of computation; both wait for the slower one, so means are taken."""
    sizes = {"hidden": shape_of(run.model.architecture or {}).hidden, "tokens": run.data.sequence_length}
    with host.make_crew("exchanges in the midst of computation", "stream", 2, sizes) as crew:
        first, second = (answer["streams"] for answer in crew.ask_all())
    return [
        {**sample, **{key: (sample[key] + other[key]) / 2 for key in ("wall_s", "cpu_s")}}
        for sample, other in zip(first, second, strict=True)
    ]


def cluster_of(probe: Probe, run: PipelineRun, ranks: int) -> Cluster:
    """Return this machine as a cluster.

    Computation is told by CPU seconds: on a core of its own it takes as long on the wall, and other work on the
    machine does not count.
    """
    shape = shape_of(run.model.architecture or {})
    flops = forward_flops(shape, run.data.sequence_length)
    # a block has two norms and two sums
    number_s = 2 * statistics.mean(norms["cpu_s"] for norms in probe.norms)
    fitted = _fit_passes(probe, flops, shape, run.data.sequence_length, number_s)
    update_s = statistics.mean(update["cpu_s"] for update in probe.update)
    peak = max(probe.peak_flops_per_s, fitted.block_flops_per_s, fitted.head_flops_per_s)
    device = Device(
        title="a core of this machine",
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / ranks,
        bandwidth_gb_per_s=_UPDATE_BYTES * shape.num_parameters / update_s / 1e9,
        fp32_tflops=peak / 1e12,
    )
    link = _fit_cluster_link(probe.exchanges)
    return Cluster(
        title=f"{ranks} processes on this machine, measured",
        pools=(Pool(device="core", count=ranks),),
        per_node=ranks,
        inside=link,
        between=link,
        efficiency=fitted.block_flops_per_s / peak,
        head_efficiency=fitted.head_flops_per_s / peak,
        first_s=fitted.first_s,
        last_s=fitted.last_s,
        microbatch_s=max([0.0, *(row["cpu_s"] for row in probe.streams if row["op"] == _STAGE)]),
        block_s=fitted.block_s,
        number_s=number_s,
        shares=_pass_shares(probe.shares),
        overlap=False,
        cores=len(probe.timed),
        device_is_host=True,
        exchanges={kind: _stream_link(probe.streams, kind) for kind in get_args(Exchange) if probe.streams},
        devices={"core": device},
    )


@dataclass(frozen=True)
class _Fitted:
    block_flops_per_s: float
    head_flops_per_s: float
    block_s: float
    first_s: float
    last_s: float


def _fit_passes(probe: Probe, flops: Flops, shape: ModelShape, sequence_length: int, number_s: float) -> _Fitted:
    """Lines through two sizes each, by tokens: a block's seconds, and what lies before and behind all blocks."""
    seconds: dict[tuple[int, bool, int], float] = {}
    for first in probe.timed[0]:
        key = (first["blocks"], first["head"], first["rows"])
        same = [
            timing
            for rank in probe.timed
            for timing in rank
            if (timing["blocks"], timing["head"], timing["rows"]) == key
        ]
        seconds[key] = statistics.mean(timing["cpu_s"] for timing in same)
    few, many = sorted({blocks for blocks, head, _ in seconds if not head})
    block = {rows: (seconds[many, False, rows] - seconds[few, False, rows]) / (many - few) for rows in _ROWS}
    before = {rows: seconds[few, False, rows] - few * block[rows] for rows in _ROWS}
    layers = shape.layers
    behind = {rows: seconds[layers, True, rows] - layers * block[rows] - before[rows] for rows in _ROWS}
    block_fixed, block_token = _fit_seconds(block, sequence_length)
    last_s, token = _fit_seconds(behind, sequence_length)
    products = max(_MIN_S, block_token - shape.hidden * number_s)
    return _Fitted(
        block_flops_per_s=3 * (flops.block + flops.scores) / products,
        head_flops_per_s=3 * flops.head / token,
        block_s=block_fixed,
        # a table's gradient, next to which looking tokens up is nothing
        first_s=max(0.0, statistics.mean(before.values())),
        last_s=last_s,
    )


def _pass_shares(passes: Sequence[Mapping[str, float]]) -> Shares:
    forward, inputs, weights = (sum(rank[name] for rank in passes) for name in ("forward", "inputs", "weights"))
    total = forward + inputs + weights
    return forward / total, inputs / total, weights / total


def _fit_seconds(points: Mapping[int, float], sequence_length: int) -> tuple[float, float]:
    """Fixed seconds and seconds for each token; neither is below zero."""
    (few, less), (many, more) = sorted(points.items())
    token = max(_MIN_S, (more - less) / ((many - few) * sequence_length))
    return max(0.0, less - token * few * sequence_length), token


def _fit_cluster_link(rows: Sequence[Mapping[str, Any]]) -> Link:
    link = fit_link(rows)
    sums = {row["bytes"]: row["seconds"] for row in rows if row["op"] == "all_reduce"}
    shares = [2 * row["seconds"] / sums[row["bytes"]] for row in rows if row["op"] == "reduce_scatter_direct"]
    # what ranks do to begin together weighs least on the largest
    largest = max((row for row in rows if row["op"] == "all_reduce"), key=lambda row: row["bytes"])
    busy = largest["cpu_s"] / largest["ranks"] / largest["seconds"]
    return link.model_copy(update={"scatter_work": statistics.median(shares), "busy": busy})


def _stream_link(rows: Sequence[Mapping[str, Any]], kind: Exchange) -> Link:
    """A link that gives the seconds of this exchange between two ranks, by the planner's formulas."""
    same = [row for row in rows if row["op"] == kind]
    walls, cpus = ([max(row[key], _MIN_EXCHANGE_S) for row in same] for key in ("wall_s", "cpu_s"))
    # a sum takes two rounds of half of its bytes, all others one, and what is sent is sent whole
    rounds, share = 2 if kind == "sum" else 1, 1.0 if kind in ("sum", "send") else 0.5
    latency, per_byte = fit_latency_and_cost(
        [(rounds, share * row["bytes"], seconds) for row, seconds in zip(same, walls, strict=True)]
    )
    return Link(latency_s=latency, bytes_per_s=1 / per_byte, busy=sum(cpus) / sum(walls))
