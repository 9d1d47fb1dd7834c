"""Values in shares, one for the key of each keeper: a share is uniform, and all of them together are the values.

So no party ever has a key that opens a client, and a keeper that opens a client's share learns nothing of it.
"""

import math
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import AggregationError
from phalanx.security.aggregate import SumRefusal
from phalanx.security.aggregate.encoding import CHUNK
from phalanx.security.aggregate.masks import KeyStream
from phalanx.security.homomorphic.key import MODULUS
from phalanx.security.homomorphic.sums import EncryptedSum, HomomorphicTerms

_WORD = 2**30 - 1
_SLACK = 1e-4
"""By which a clipped client's norm may be off, in float64 and rounded."""


def share_out(whole: NDArray[np.int64], keepers: int) -> list[NDArray[np.int64]]:
    """Return shares that add up to integers modulo `MODULUS`; any of them but one are uniform and independent.

    Args:
        whole: Integers from `rounded`.
        keepers: Number of shares, two or more.
    """
    drawn = [_draw_integers(len(whole)) for _ in range(keepers - 1)]
    return [*drawn, (whole - sum(drawn, np.zeros_like(whole))) % MODULUS]


def join_sums(terms: HomomorphicTerms, clients: tuple[str, ...], sums: Sequence[NDArray[np.int64]]) -> EncryptedSum:
    """Put the opened sums of all keepers' shares together.

    Args:
        sums: ``[length]`` each, modulo `MODULUS`; one a keeper.

    Raises:
        AggregationError: What comes out is no sum of values within the clip: a keeper opened another one, or lies.
    """
    if any(total.shape != (terms.length,) or total.dtype != np.int64 for total in sums):
        raise AggregationError(SumRefusal.MALFORMED, f"sums: expected {terms.length} integers of each keeper")
    total = sum(sums[1:], sums[0]) % MODULUS
    total = np.where(total > MODULUS // 2, total - MODULUS, total)
    step = terms.clip / terms.max_level
    norm, rounding = float(np.linalg.norm(total * step)), math.sqrt(terms.length) * step / 2
    if norm > len(clients) * (terms.clip * (1 + _SLACK) + rounding):
        raise AggregationError(
            SumRefusal.BAD_INPUT,
            f"sum: has the norm {norm:.3g}, and {len(clients)} clients of {terms.clip:g} each cannot; a keeper opened "
            "another sum than the others, or lies",
        )
    return EncryptedSum(clients, total, (total * (step / len(clients))).astype(np.float32))


def _draw_integers(count: int) -> NDArray[np.int64]:
    """Draw integers below `MODULUS` from the system's generator, by way of AES-256."""
    stream, accepted = KeyStream(os.urandom(32)), np.zeros(0, np.int64)
    parts: list[NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        candidates = stream.next_words(min(CHUNK, missing + 64)).astype(np.int64) & _WORD
        accepted = candidates[candidates < MODULUS][:missing]
        parts.append(accepted)
        missing -= len(accepted)
    return np.concatenate(parts) if parts else accepted
