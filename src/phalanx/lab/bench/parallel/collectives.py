"""``phalanx bench collectives``: what exchanges between ranks of this machine take, beside the bound by bandwidth."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

from phalanx.errors import InputError
from phalanx.lab.bench.measure.harness import print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.planner.cluster import links as model
from phalanx.planner.cluster.links import Link, fit_machine

_KIB, _MIB = 1024, 1024**2
_SIZES = (4 * _KIB, 64 * _KIB, 512 * _KIB, 4 * _MIB, 16 * _MIB)
_RANKS = (2, 4, 8)
_OPERATIONS = (
    "all_reduce",
    "all_reduce_direct",
    "reduce_scatter",
    "reduce_scatter_direct",
    "all_gather",
    "all_gather_direct",
    "all_to_all",
    "broadcast",
    "send",
)
_BYTES_IN_ALL, _MAX_TIMES, _MIN_TIMES = 64 * _MIB, 40, 3

Row = dict[str, Any]


def bench_collectives(quick: bool) -> dict[str, Any]:
    """Measure every operation over ranks and sizes; progress goes to standard error.

    Args:
        quick: Two ranks and three sizes alone: what ``phalanx plan --probe`` needs, in half a minute.
    """
    sizes = (_SIZES[0], _SIZES[2], _SIZES[3]) if quick else _SIZES
    return measure_collectives(_RANKS[:1] if quick else _RANKS, sizes, _OPERATIONS, quick=quick)


def measure_collectives(
    ranks: Sequence[int], sizes: Sequence[int], operations: Sequence[str], *, quick: bool
) -> dict[str, Any]:
    """Measure these; see `bench_collectives`."""
    load = load_average()
    rows: list[Row] = []
    with scratch_directory() as directory, RankForkServer(directory) as host:
        for world in ranks:
            rows += exchange_rows(host, world, sizes, operations)
            print_progress(f"collectives: {world} ranks are done")
    return summarise_collectives(rows, load, quick=quick)


def summarise_collectives(rows: Sequence[Row], load: float | None, *, quick: bool) -> dict[str, Any]:
    """What the bench returns about rows that `exchange_rows` gave."""
    link = _fit_link(rows, os.cpu_count())
    return {
        **bench_head("collectives", load, quick=quick),
        "link": None if link is None else link.model_dump(),
        "rows": [{**row, **_with_bounds(row, link)} for row in rows],
    }


def exchange_rows(host: RankForkServer, world: int, sizes: Sequence[int], operations: Sequence[str]) -> list[Row]:
    """Time operations between so many ranks.

    Returns:
        One row each: ``op``, ``ranks``, ``bytes``, ``seconds`` (median, until the last rank is done), ``best_s``,
        ``cpu_s`` of all ranks together, ``times``.
    """
    rows: list[Row] = []
    with host.make_crew(f"exchange between {world} ranks", "exchange", world) as crew:
        for op, size in itertools.product(operations, sizes):
            times = max(_MIN_TIMES, min(_MAX_TIMES, _BYTES_IN_ALL // (size * world)))
            answers = crew.ask_all(op=op, bytes=size, times=times)
            timed = {key: answers[0][key] for key in ("seconds", "best_s")}
            cpu_s = sum(answer["cpu_s"] for answer in answers)
            rows.append({"op": op, "ranks": world, "bytes": size, **timed, "cpu_s": cpu_s, "times": times})
    return rows


def _fit_link(rows: Sequence[Row], cores: int | None) -> Link | None:
    try:
        return fit_machine(rows, cores)
    except InputError:
        return None


def _with_bounds(row: Row, link: Link | None) -> Row:
    """Return the bandwidth bound of an all-reduce, and the planner's estimate with the fitted link."""
    op, ranks, size = row["op"], row["ranks"], row["bytes"]
    bound = model.ring_bound(size, ranks, link) if link is not None and op.startswith("all_reduce") else None
    planned = {
        "all_reduce": model.all_reduce,
        "reduce_scatter_direct": model.reduce_scatter,
        "all_gather": model.all_gather,
        "all_gather_direct": model.all_gather,
        "all_to_all": model.all_to_all,
    }.get(op)
    return {
        # ranks that outnumber the cores share them, and neither figure knows that
        "shares_cores": ranks > (os.cpu_count() or ranks),
        "bound_s": bound,
        "over_bound": None if bound is None else row["seconds"] / bound,
        "model_s": None if planned is None or link is None else planned(size, ranks, link),
    }
