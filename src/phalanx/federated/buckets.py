"""Robust rules over buckets of masked sums: private inside a bucket, robust between buckets.

A secure sum hides the single updates that a robust rule needs. So sites are drawn into buckets that are large enough to
hide each of them; each bucket has a secure sum of its own, and the rule judges the buckets' means. f lying sites spoil
f buckets at most, so a rule must stand f of the number of buckets.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.aggregators import AGGREGATORS, aggregate
from phalanx.errors import ConfigError
from phalanx.security.aggregate import LEAST_CONTRIBUTORS, SumResult


def bucket_sites(sites: Sequence[str], size: int, chance: bytes) -> list[tuple[str, ...]]:
    """Draw sites into buckets of `size` or one more.

    Args:
        size: At least 3, or as many as each site wants in a sum.
        chance: Bytes that no site knew when it joined, such as the digest of the round's model: the order is by its
            hashes.

    Raises:
        ConfigError: The sites do not fill one bucket, or a bucket would hide nothing.
    """
    if not LEAST_CONTRIBUTORS <= size <= len(sites):
        raise ConfigError(f"buckets of {size} out of {len(sites)} sites: expected {LEAST_CONTRIBUTORS} to {len(sites)}")
    order = sorted(sites, key=lambda site: hashlib.sha256(chance + site.encode()).digest())
    count = len(order) // size
    return [tuple(sorted(order[number::count])) for number in range(count)]


def robust_over_buckets(sums: Sequence[SumResult], rule: str, byzantine: int) -> Tensor:
    """Apply a robust rule to the buckets' means.

    Args:
        sums: One sum per bucket, ``[buckets]``.
        rule: Name in `AGGREGATORS`.
        byzantine: Sites that may lie, each of which spoils one bucket at most.

    Raises:
        ConfigError: The rule does not stand so many of so few buckets.
    """
    max_byzantine = AGGREGATORS[rule].most_byzantine(len(sums))
    if byzantine > max_byzantine:
        raise ConfigError(
            f"{len(sums)} buckets: {rule} tolerates at most {max_byzantine} spoiled buckets, but {byzantine} sites "
            "may lie; make smaller buckets, or ask more sites"
        )
    return aggregate(torch.stack([torch.from_numpy(bucket.mean()) for bucket in sums]), rule, byzantine)
