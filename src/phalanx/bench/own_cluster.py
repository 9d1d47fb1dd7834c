"""This machine as a cluster of the planner, measured on ranks that know of no layout."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.bench.collectives import exchange_rows
from phalanx.bench.rank_training import TrainingSpec
from phalanx.bench.ranks import RankHost
from phalanx.planner.compute import Flops, forward_flops
from phalanx.planner.hardware import GIB, Cluster, Device, Pool
from phalanx.planner.links import Link, fit
from phalanx.planner.local import core_flops
from phalanx.planner.shape import shape_of
from phalanx.train import RunConfig

Clock = Literal["wall_s", "cpu_s"]

_ROWS = (1, 4)
_LINK_SIZES = (16 * 1024, 256 * 1024, 2 * 1024**2, 8 * 1024**2)
_LEAST_S = 1e-9
_UPDATE_BYTES = 28
"""Of an fp32 parameter that AdamW reads and writes: weight and moments both ways, and the gradient."""


@dataclass(frozen=True)
class Probe:
    """What was timed.

    Attributes:
        timed: See `phalanx.bench.rank_probe`; one list for each core.
        update: The optimizer's step, likewise.
        sharing: What sharing a block costs a microbatch, likewise.
        exchanges: Rows as `bench collectives` has them, between two ranks.
        peak_flops_per_s: The best product of one core.
    """

    timed: Sequence[Sequence[Mapping[str, Any]]]
    update: Sequence[Mapping[str, float]]
    sharing: Sequence[Mapping[str, float]]
    exchanges: Sequence[Mapping[str, Any]]
    peak_flops_per_s: float


def probe_machine(host: RankHost, run: RunConfig, cache: Path) -> Probe:
    """Time one rank's work on every core at once, and exchanges between two ranks.

    Raises:
        TrainingError: The ranks failed.
    """
    cores = len(os.sched_getaffinity(0))
    spec = TrainingSpec(arm="", run=run, cache=str(cache.resolve()))
    with host.crew("probe", "probe", cores, {"spec": spec.model_dump_json()}) as crew:
        answers = crew.ask(rows=list(_ROWS))
    rows = exchange_rows(host, 2, _LINK_SIZES, ("all_reduce", "reduce_scatter_direct"))
    timed, update, sharing = ([answer[key] for answer in answers] for key in ("timed", "update", "sharing"))
    return Probe(timed, update, sharing, rows, core_flops(cores))


def cluster_of(probe: Probe, run: RunConfig, ranks: int, clock: Clock) -> Cluster:
    """Return this machine as a cluster.

    Args:
        probe: What was timed.
        run: What was timed with.
        ranks: How many share the machine.
        clock: Seconds on the wall, or of CPU time: the latter also mean something on a machine with other work.
    """
    shape = shape_of(run.model.architecture or {})
    flops = forward_flops(shape, run.data.sequence_length)
    found = _fit(probe, flops, shape.layers, run.data.sequence_length, clock)
    update_s = statistics.mean(update[clock] for update in probe.update)
    peak = max(probe.peak_flops_per_s, found.block_flops_per_s, found.head_flops_per_s)
    device = Device(
        title="a core of this machine",
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / ranks,
        bandwidth_gb_per_s=_UPDATE_BYTES * shape.parameters / update_s / 1e9,
        fp32_tflops=peak / 1e12,
    )
    link = _link(probe.exchanges, clock)
    return Cluster(
        title=f"{ranks} processes on this machine, measured",
        pools=(Pool(device="core", count=ranks),),
        per_node=ranks,
        inside=link,
        between=link,
        efficiency=found.block_flops_per_s / peak,
        head_efficiency=found.head_flops_per_s / peak,
        microbatch_s=found.microbatch_s,
        block_s=found.block_s,
        shared_block_s=statistics.mean(sharing[clock] for sharing in probe.sharing),
        overlap=False,
        # CPU time does not pass while a rank waits for a core
        cores=len(probe.timed) if clock == "wall_s" else None,
        devices={"core": device},
    )


@dataclass(frozen=True)
class _Fitted:
    block_flops_per_s: float
    head_flops_per_s: float
    block_s: float
    microbatch_s: float


def _fit(probe: Probe, flops: Flops, layers: int, sequence_length: int, clock: Clock) -> _Fitted:
    """Two lines through two sizes each: a block's seconds, and those of all that is not a block, by tokens."""
    seconds: dict[tuple[int, bool, int], float] = {}
    for first in probe.timed[0]:
        key = (first["blocks"], first["head"], first["rows"])
        same = [one for rank in probe.timed for one in rank if (one["blocks"], one["head"], one["rows"]) == key]
        seconds[key] = statistics.mean(one[clock] for one in same)
    few, many = sorted({blocks for blocks, head, _ in seconds if not head})
    block = {rows: (seconds[many, False, rows] - seconds[few, False, rows]) / (many - few) for rows in _ROWS}
    rest = {rows: seconds[layers, True, rows] - layers * block[rows] for rows in _ROWS}
    block_fixed, block_token = _line(block, sequence_length)
    fixed, token = _line(rest, sequence_length)
    return _Fitted(
        block_flops_per_s=3 * (flops.block + flops.scores) / block_token,
        head_flops_per_s=3 * flops.head / token,
        block_s=block_fixed,
        microbatch_s=fixed,
    )


def _line(points: Mapping[int, float], sequence_length: int) -> tuple[float, float]:
    """Fixed seconds and seconds for each token; neither is below zero."""
    (few, less), (many, more) = sorted(points.items())
    token = max(_LEAST_S, (more - less) / ((many - few) * sequence_length))
    return max(0.0, less - token * few * sequence_length), token


def _link(rows: Sequence[Mapping[str, Any]], clock: Clock) -> Link:
    if clock == "cpu_s":
        rows = [{**row, "seconds": row["cpu_s"] / row["ranks"]} for row in rows]
    link = fit(rows)
    sums = {row["bytes"]: row["seconds"] for row in rows if row["op"] == "all_reduce"}
    shares = [2 * row["seconds"] / sums[row["bytes"]] for row in rows if row["op"] == "reduce_scatter_direct"]
    return link.model_copy(update={"scatter_work": statistics.median(shares)})
