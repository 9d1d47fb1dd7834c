"""The encoding of values: real numbers become elements of Z_2^32, so that no sum of them can wrap.

A client's values are scaled down to the Euclidean norm `clip`, so each is at most `clip`. One unit of the ring is
``clip / levels`` with ``levels = floor((2^31 - 1) / (clients * max_weight))``: all clients with all weights, each at
its bound in the same place, add up to less than 2^31. The element after the last value is the weight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST = 2**31 - 1
MIN_LEVELS = 2**8
Words = NDArray[np.uint32]
Values = NDArray[np.float32] | NDArray[np.float64]
CHUNK = 2**16
"""Elements that are worked on at once: their buffers stay in the cache."""


@dataclass(frozen=True)
class RingEncoding:
    """The encoding of one round."""

    clients: int
    clip: float
    max_weight: int

    @property
    def max_level(self) -> int:
        """The largest integer that a value becomes."""
        return LARGEST // (self.clients * self.max_weight)

    @property
    def step_size(self) -> float:
        """The real number that one unit of the ring stands for."""
        return self.clip / self.max_level

    def scale_for(self, norm: float) -> float:
        """Return what values of this norm are multiplied with to become integers."""
        return min(1.0, self.clip / norm if norm > 0 else 1.0) / self.step_size

    def round_into(self, values: Values, scale: float, weight: int, random: Words, out: Words) -> None:
        """Encode some values, by rounding that is right on average.

        Args:
            scale: Scale from `scale_for` over all values.
            weight: Up to `max_weight`.
            random: One uniform word a value; ``floor(x + word / 2^32)`` has the mean x.
        """
        exact = np.multiply(values, scale, dtype=np.float64)
        exact += np.multiply(random, 2.0**-32, dtype=np.float64)
        np.floor(exact, out=exact)
        # a rounding error of the product must not exceed the bound by one
        np.clip(exact, -self.max_level, self.max_level, out=exact)
        integers = out.view(np.int32)
        np.copyto(integers, exact, casting="unsafe")
        if weight != 1:
            integers *= np.int32(weight)

    def weighted_mean(self, total: Words, weight: int) -> NDArray[np.float32]:
        """Return the weighted mean of the clients' values, given the sum of their messages without its last element."""
        return (total.view(np.int32) * (self.step_size / weight)).astype(np.float32)


def norm_of(values: Values) -> float:
    """Return the Euclidean norm; NaN or infinite where a value is."""
    squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for chunk in chunk_slices(len(values)):
            part = values[chunk].astype(np.float64)
            squares += float(np.dot(part, part))
    return math.sqrt(squares)


def chunk_slices(length: int) -> Iterator[slice]:
    """Yield the slices that a vector is worked on in."""
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))
