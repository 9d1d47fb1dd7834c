"""The time of collectives on a ring: a latency for each round, and the bytes that each rank must send.

Source: Patarasu and Yuan 2009: no all-reduce moves less than ``2 (n - 1) / n`` of the bytes through every rank.
"""

from phalanx.planner.cluster.links import Link


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


def send(size: float, link: Link) -> float:
    """Seconds until one other rank has `size` bytes."""
    return link.latency_s + size / link.bytes_per_s


def gather_to_one(size: float, ranks: int, link: Link) -> float:
    """Seconds until one rank has received `size` bytes from each, and each its sum: what a ring avoids."""
    return 2 * (link.latency_s + (ranks - 1) * size / link.bytes_per_s)


def ring_bound(size: float, ranks: int, link: Link) -> float:
    """Fewest seconds of any all-reduce by bandwidth alone."""
    return 2 * (ranks - 1) / ranks * size / link.bytes_per_s
