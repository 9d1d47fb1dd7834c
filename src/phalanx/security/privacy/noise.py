"""Gaussian noise from a cryptographic stream: AES-256 in counter mode, Box and Muller's transform in float64.

A generator of torch or numpy has a state that its outputs give away, and CPU generators take seeds of 64 bits. Four
variates are added for each value: their sum does not tell the grid of floating-point numbers that each was rounded to,
by which a single one can be found out (Mironov 2012; Holohan and Braghin 2021).
"""

import hmac
import math
import os
import secrets
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.crypto import in_domain, make_private_directory, read_private, write_private

SEED_BYTES = 32
_SUMMANDS = 4
_CHUNK = 2**15


class SecureStream:
    """Uniform 64-bit words that are a function of a seed.

    Args:
        seed: 32 bytes, secret, for this stream alone.
    """

    def __init__(self, seed: bytes) -> None:
        self._encryptor = Cipher(AES256(seed), CTR(bytes(16))).encryptor()

    def next_words(self, count: int) -> NDArray[np.uint64]:
        """Return the next words."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), "<u8")

    def next_normals(self, count: int) -> NDArray[np.float64]:
        """Return the next standard normal values."""
        pairs = -(-count * _SUMMANDS // 2)
        uniform = (self.next_words(2 * pairs) >> np.uint64(11)).astype(np.float64)
        # from (0, 1], for the logarithm
        radius = np.sqrt(-2.0 * np.log((uniform[:pairs] + 1.0) * 2.0**-53))
        angle = uniform[pairs:] * (2.0 * np.pi * 2.0**-53)
        normals = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
        parts: NDArray[np.float64] = normals[: count * _SUMMANDS].reshape(_SUMMANDS, count)
        total: NDArray[np.float64] = parts.sum(0) / np.sqrt(_SUMMANDS)
        return total


def gaussian_noise(stream: SecureStream, count: int, deviation: float) -> NDArray[np.float32]:
    """Return values of normal noise in float32."""
    out = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        part = out[start : start + _CHUNK]
        part[:] = stream.next_normals(len(part)) * deviation
    return out


Below = Callable[[int], int]
"""Draws a uniform integer from 0 to below its argument."""


def discrete_gaussian(count: int, variance: Fraction, below: Below = secrets.randbelow) -> NDArray[np.int64]:
    """Draw integers of a discrete Gaussian.

    Args:
        variance: The parameter sigma^2, above 0; the variance itself is at most that.
        below: Draws uniform integers; another one than the system's generator is for test vectors.

    Guarantees:
        Each value has exactly the distribution, if `below` is uniform. The running time depends on the drawn values.
    """
    if variance <= 0:
        raise ValueError(f"variance {variance}: expected more than 0")
    # floor(sigma) + 1, without a root of a rational being rounded
    scale = math.isqrt(math.floor(variance)) + 1
    return np.array([_draw_gaussian(variance, scale, below) for _ in range(count)], np.int64)


def _draw_gaussian(variance: Fraction, scale: int, below: Below) -> int:
    while True:
        value = _draw_laplace(scale, below)
        miss = abs(value) - variance / scale
        if _bernoulli_exp(miss * miss / (2 * variance), below):
            return value


def _draw_laplace(scale: int, below: Below) -> int:
    """Draw an integer x with a chance proportional to ``exp(-|x| / scale)``."""
    while True:
        rest = below(scale)
        if not _bernoulli_exp(Fraction(rest, scale), below):
            continue
        count = 0
        while _bernoulli_exp(Fraction(1), below):
            count += 1
        size, is_negative = rest + scale * count, below(2) == 1
        # zero has one sign only
        if size or not is_negative:
            return -size if is_negative else size


def _bernoulli_exp(gamma: Fraction, below: Below) -> bool:
    """Return True with the chance ``exp(-gamma)``."""
    while gamma > 1:
        if not _bernoulli_exp(Fraction(1), below):
            return False
        gamma -= 1
    count = 1
    while below(gamma.denominator * count) < gamma.numerator:
        count += 1
    return count % 2 == 1


def poisson_sample(key: bytes, number: int, rows: int, batch_size: int) -> NDArray[np.int64]:
    """Return the rows of one sample, ascending; it may be empty.

    Args:
        key: 32 secret bytes. Where an adversary knows them, it knows which step saw a row, and sampling hides nothing.
        batch_size: Mean number of drawn rows, at most `rows`.

    Guarantees:
        The chance of a row is the largest multiple of 2^-64 up to ``batch_size / rows``, whatever others are drawn.
    """
    if batch_size == rows:
        return np.arange(rows)
    seed = hmac.digest(key, in_domain("privacy-sample/1", canonical_json([number])), "sha256")
    threshold = np.uint64((batch_size << 64) // rows)
    return np.flatnonzero(SecureStream(seed).next_words(rows) < threshold)


def sampling_key(directory: Path) -> bytes:
    """Return the key that decides the draws of all sessions, made where there is none.

    A key that was lost is made anew: charges so far stay charges, and later draws are as independent of them.
    """
    path = directory / "sampling.key"
    if not path.exists():
        make_private_directory(directory)
        write_private(path, os.urandom(SEED_BYTES))
    key = read_private(path)
    if len(key) != SEED_BYTES:
        raise CheckpointError(f"{path}: has {len(key)} bytes, expected {SEED_BYTES}; remove it, and another is made")
    return key
