"""Poisson samples: each row of a step is drawn by itself, as a secret key and the number of the charge decide."""

import hmac

import numpy as np
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.security.crypto import in_domain
from phalanx.security.privacy.noise import SecureStream


def poisson_sample(key: bytes, number: int, rows: int, batch_size: int) -> NDArray[np.int64]:
    """Return the rows of one sample, ascending; it may be empty.

    Args:
        key: 32 secret bytes. Where an adversary knows them, it knows which step saw a row, and sampling hides nothing.
        number: Of the charge; each has a sample of its own.
        rows: How many there are.
        batch_size: How many are drawn in the mean, at most `rows`.

    Guarantees:
        The chance of a row is the largest multiple of 2^-64 up to ``batch_size / rows``, whatever others are drawn.
    """
    if batch_size == rows:
        return np.arange(rows)
    seed = hmac.digest(key, in_domain("privacy-sample/1", canonical_json([number])), "sha256")
    threshold = np.uint64((batch_size << 64) // rows)
    return np.flatnonzero(SecureStream(seed).words(rows) < threshold)
