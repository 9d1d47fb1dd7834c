"""Links between ranks, by latency and bandwidth: presets, measurements, and the time of collectives on a ring.

A collective takes a latency for each round, and the bytes that each rank must send.

Source: Patarasu and Yuan 2009: no all-reduce moves less than ``2 (n - 1) / n`` of the bytes through every rank.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.errors import InputError


class Link(StrictModel):
    """A link between two ranks.

    Attributes:
        latency_s: Seconds from the start of a transmission until an empty message has arrived.
        bytes_per_s: Rate of one rank in one direction, while all ranks send.
        scatter_work: Cost of a reduce-scatter, in units of the ring's; 2 where it is done by a whole all-reduce.
        busy: Share of the time in which a rank's own core works for it; above 1 where several threads do. Where ranks
            share cores, the rest costs the others nothing.
    """

    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    scatter_work: float = Field(default=1.0, gt=0)
    busy: float = Field(default=1.0, gt=0)

    def without_waiting(self) -> "Link":
        """The same link by the seconds in which a core works, without any waiting."""
        return self.model_copy(
            update={"latency_s": self.latency_s * self.busy, "bytes_per_s": self.bytes_per_s / self.busy, "busy": 1.0}
        )


def read_probe(path: Path) -> Link:
    """Return the link that a probe measured.

    Args:
        path: Output of ``phalanx bench collectives --json``: ``rows`` with ``op``, ``ranks``, ``bytes`` and
            ``seconds``, and the machine's ``cores``; see `fit_machine`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror}); give a probe's JSON") from exc
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{path}: is not valid JSON: {exc}") from exc
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise InputError(f"{path}: has no rows; write it with phalanx bench collectives --json --out FILE")
    machine = data.get("machine")
    cores = machine.get("cores") if isinstance(machine, dict) else None
    return fit_machine(rows, cores if isinstance(cores, int) else None, str(path))


def fit_machine(rows: Iterable[Any], cores: int | None, where: str = "probe") -> Link:
    """Fit the link between ranks that have a core each.

    Args:
        rows: Rows of ``all_reduce`` give latency and bandwidth; rows of ``reduce_scatter_direct``, which the engine
            uses on CPUs, or else of ``reduce_scatter``, give its work, where there are any.
        cores: Cores of the machine; rows of more ranks than cores include waiting for a core and are left out, unless
            there are no others. None uses all.
    """
    mappings = [row for row in rows if isinstance(row, Mapping)]
    alone = [row for row in mappings if cores is None or not isinstance(row.get("ranks"), int) or row["ranks"] <= cores]
    used = alone if any(row.get("op") == "all_reduce" for row in alone) else mappings
    link = fit_link(used, where)
    ops = {row.get("op") for row in used}
    op = "reduce_scatter_direct" if "reduce_scatter_direct" in ops else "reduce_scatter"
    scatters = [_read_point(row, where) for row in used if row.get("op") == op]
    if not scatters:
        return link
    # a reduce-scatter has half the rounds and half the traffic of an all-reduce
    shares = [
        2 * seconds / (rounds * link.latency_s + traffic / link.bytes_per_s) for rounds, traffic, seconds in scatters
    ]
    return link.model_copy(update={"scatter_work": statistics.median(shares)})


def fit_link(rows: Iterable[Mapping[str, Any]], where: str = "probe") -> Link:
    """Fit latency and bandwidth to measured all-reduces.

    The model is ``seconds = rounds * latency + traffic / bandwidth`` with ``2 (n - 1)`` rounds and ``2 (n - 1) / n``
    times the bytes; relative errors are made small, so that small messages count as much as large ones.
    """
    points = [_read_point(row, where) for row in rows if isinstance(row, Mapping) and row.get("op") == "all_reduce"]
    if len({traffic for _, traffic, _ in points}) < 2:
        raise InputError(f"{where}: needs all_reduce rows of at least two sizes, found {len(points)} rows")
    latency, per_byte = fit_latency_and_cost(points)
    return Link(latency_s=latency, bytes_per_s=1.0 / per_byte)


def fit_latency_and_cost(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the latency and the seconds per byte that fit rounds, traffic and seconds best; neither is below zero.

    Args:
        points: Rounds, bytes that pass, and the seconds that they took, above zero; two sizes at least.
    """
    # normal equations of two unknowns, each row divided by its seconds
    aa = sum((rounds / seconds) ** 2 for rounds, _, seconds in points)
    ab = sum(rounds * traffic / seconds**2 for rounds, traffic, seconds in points)
    bb = sum((traffic / seconds) ** 2 for _, traffic, seconds in points)
    a, b = (sum(point[index] / point[2] for point in points) for index in (0, 1))
    determinant = aa * bb - ab * ab
    latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0 or per_byte <= 0:
        # one of the two does not show: what is left is a single unknown
        return (0.0, b / bb) if latency < 0 else (a / aa, 1e-15)
    return latency, per_byte


def _read_point(row: Mapping[str, Any], where: str) -> tuple[float, float, float]:
    values = [row.get(key) for key in ("ranks", "bytes", "seconds")]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != len(values) or numbers[0] < 2 or not numbers[2] > 0:
        raise InputError(f"{where}: found the row {dict(row)}; expected ranks of 2 or more, bytes and seconds")
    ranks, size, seconds = numbers
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size, seconds


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds until every rank has the sum of `size` bytes of each."""
    return 2 * all_gather(size, ranks, link)


def reduce_scatter(size: float, ranks: int, link: Link) -> float:
    """Seconds until every rank has its part of the sum of `size` bytes of each."""
    return link.scatter_work * all_gather(size, ranks, link)


def all_gather(size: float, ranks: int, link: Link) -> float:
    """Seconds until every rank has all `size` bytes, of which it had its part."""
    return (ranks - 1) * link.latency_s + (ranks - 1) / ranks * size / link.bytes_per_s


def all_to_all(size: float, ranks: int, link: Link) -> float:
    """Seconds until every rank has its part of the `size` bytes of each."""
    return (ranks - 1) * link.latency_s + (ranks - 1) / ranks * size / link.bytes_per_s


def send_seconds(size: float, link: Link) -> float:
    """Seconds until one other rank has `size` bytes."""
    return link.latency_s + size / link.bytes_per_s


def ring_bound(size: float, ranks: int, link: Link) -> float:
    """Fewest seconds of any all-reduce by bandwidth alone."""
    return 2 * (ranks - 1) / ranks * size / link.bytes_per_s
