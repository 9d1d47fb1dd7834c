"""Random numbers that words decide: the same on every machine, with every version of numpy."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_BITS = 53
"""Of a fraction; a double holds as many."""


class Draw:
    """A stream of random numbers for one sample.

    Only raw bits of a counter-based generator are used: numpy keeps these the same for ever, and not what it makes of
    them.

    Args:
        words: The seed, the number of the sample and whatever else tells streams apart.
    """

    def __init__(self, *words: object) -> None:
        raw = hashlib.sha256("\x1f".join(("phalanx rows", *map(str, words))).encode()).digest()
        self._bits = np.random.Philox(key=np.frombuffer(raw[:16], dtype="<u8").astype(np.uint64))

    def fractions(self, count: int) -> NDArray[np.float64]:
        """Return numbers from 0 to below 1, ``[count]``."""
        raw = np.asarray(self._bits.random_raw(count), dtype=np.uint64)
        return (raw >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS

    def below(self, size: int, count: int) -> NDArray[np.int64]:
        """Return whole numbers from 0 to below `size`, ``[count]``."""
        # the product can round up to `size` itself for sizes above 2**53 alone
        return (self.fractions(count) * size).astype(np.int64)

    def order(self, size: int) -> NDArray[np.int64]:
        """Return ``0 .. size - 1`` in a random order."""
        return np.argsort(self.fractions(size), kind="stable").astype(np.int64)
