"""The graph of a secure sum: which clients share a mask and keep shares of each other's secrets.

Up to 20 clients every two are neighbours. Beyond that the graph is a circle in an order that no party chooses, in which
each client has the same number of nearest clients as neighbours. What the numbers must fulfil, where fewer than a third
of all collude with the server and the server lets clients drop out as it likes:

- a client that is summed has so many neighbours in the sum that its honest part has `minimum` clients (privacy);
- when random clients drop out, as many as the threshold lets, no secret is lost (the round ends).

The order comes from a digest over all that the clients signed. A server that makes its colluding clients sign again and
again tries as many orders; 2^80 tries, and 2^-40 for them all to fail, are in the bound.

Source: Bell et al. 2020 (SecAgg+), with a bound against a server that chooses among orders and drop-outs.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

COMPLETE_UP_TO = 20
_PRIVACY_BITS = 40 + 80
_LIVENESS_BITS = 10


class Degree(NamedTuple):
    """The numbers of one client.

    Attributes:
        neighbours: Clients that it shares a mask with, and that keep shares of its secrets.
        shares: Threshold: so many shares recover a secret, and so many clients must be in the sum.
    """

    neighbours: int
    shares: int


def threshold_of(count: int) -> int:
    """Return how many of `count` clients must agree: more than two thirds."""
    return 2 * count // 3 + 1


def max_colluding(count: int) -> int:
    """Return how many clients may collude with the server: fewer than a third."""
    return (count - 1) // 3


@lru_cache(maxsize=64)
def degree_of(count: int, minimum: int) -> Degree:
    """Return the numbers for a cohort."""
    complete = Degree(count - 1, threshold_of(count) - 1)
    if count <= COMPLETE_UP_TO:
        return complete
    low, high = 1, (count - 1) // 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _sparse_degree(count, minimum, 2 * middle) else (middle + 1, high)
    return _sparse_degree(count, minimum, 2 * low) or complete


def neighbours_of(names: Sequence[str], seed: bytes, minimum: int) -> dict[str, tuple[str, ...]]:
    """Return the neighbours of each client; the relation is symmetric.

    Args:
        minimum: Fewest clients in a sum, as in `degree_of`.
    """
    order = sorted(names, key=lambda name: hashlib.sha256(seed + name.encode("ascii")).digest())
    count, degree = len(order), degree_of(len(order), minimum).neighbours
    if degree == count - 1:
        return {name: tuple(sorted(set(order) - {name})) for name in order}
    steps = [step for k in range(1, degree // 2 + 1) for step in (k, -k)]
    return {name: tuple(sorted(order[(i + step) % count] for step in steps)) for i, name in enumerate(order)}


def _sparse_degree(count: int, minimum: int, degree: int) -> Degree | None:
    """Return the threshold that this degree needs for privacy, or None where a round would fail too often."""
    shares = _max_colluding_neighbours(count, degree) + minimum - 1
    alive = threshold_of(count) - 1
    lost = sum(_count_ways(count - 1, alive, degree, few) for few in range(min(shares, degree + 1)))
    ends = shares <= degree and lost * count << _LIVENESS_BITS <= comb(count - 1, degree)
    return Degree(degree, shares) if ends else None


def _max_colluding_neighbours(count: int, degree: int) -> int:
    """Return the number of colluding neighbours that no client exceeds, except with probability 2^-_PRIVACY_BITS."""
    colluding, more = max_colluding(count), 0
    for number in range(min(colluding, degree), 0, -1):
        more += _count_ways(count - 1, colluding, degree, number)
        if more * count << _PRIVACY_BITS > comb(count - 1, degree):
            return number
    return 0


def _count_ways(others: int, marked: int, drawn: int, hits: int) -> int:
    """Count the sets of `drawn` of all others in which `hits` are marked."""
    return comb(marked, hits) * comb(others - marked, drawn - hits) if hits <= drawn else 0
