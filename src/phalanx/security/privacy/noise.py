"""Gaussian noise from a cryptographic stream: AES-256 in counter mode, Box and Muller's transform in float64.

A generator of torch or numpy has a state that its outputs give away, and CPU generators take seeds of 64 bits. Four
variates are added for each value: their sum does not tell the grid of floating-point numbers that each was rounded to,
by which a single one can be found out (Mironov 2012; Holohan and Braghin 2021).
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

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

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next words."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), "<u8")

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return the next standard normal values."""
        pairs = -(-count * _SUMMANDS // 2)
        uniform = (self.words(2 * pairs) >> np.uint64(11)).astype(np.float64)
        # from (0, 1], for the logarithm
        radius = np.sqrt(-2.0 * np.log((uniform[:pairs] + 1.0) * 2.0**-53))
        angle = uniform[pairs:] * (2.0 * np.pi * 2.0**-53)
        both = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
        parts: NDArray[np.float64] = both[: count * _SUMMANDS].reshape(_SUMMANDS, count)
        total: NDArray[np.float64] = parts.sum(0) / np.sqrt(_SUMMANDS)
        return total


def gaussian_noise(stream: SecureStream, count: int, deviation: float) -> NDArray[np.float32]:
    """Return values of normal noise in float32.

    Args:
        stream: Gives the randomness.
        count: Of the values.
        deviation: Standard deviation.
    """
    out = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        part = out[start : start + _CHUNK]
        part[:] = stream.normal(len(part)) * deviation
    return out
