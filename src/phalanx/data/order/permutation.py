"""A keyed permutation that is computed, not stored: the order of one epoch."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 6


def permute_positions(
    positions: NDArray[np.uint64], size: int, seed: int, epoch: int, label: str = ""
) -> NDArray[np.uint64]:
    """Where a keyed permutation of ``0 .. size - 1`` sends each position.

    A Feistel network on the next even number of bits, walked until it lands inside; a bijection for every
    key whatever its round function, so no sample is lost or doubled within an epoch.

    Args:
        positions: ``[n]``, each below `size`.
        size: At least 1.

    Source: Black and Rogaway 2002 (cycle walking); the round function is the finaliser of splitmix64.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    text = f"phalanx order {seed} {epoch}" + (f" {label}" if label else "")
    raw = hashlib.shake_256(text.encode()).digest(8 * _NUM_ROUNDS)
    keys = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    result = _feistel_network(positions.astype(np.uint64), half_bits, keys)
    outside = result >= size
    while outside.any():
        result[outside] = _feistel_network(result[outside], half_bits, keys)
        outside = result >= size
    return result


def sample_indices(start: int, count: int, size: int, seed: int) -> list[int]:
    """The sequences that samples ``start .. start + count - 1`` of the run are, over epoch borders."""
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(start + len(indices), size)
        stop = min(size, offset + count - len(indices))
        indices += permute_positions(np.arange(offset, stop, dtype=np.uint64), size, seed, epoch).tolist()
    return indices


def _feistel_network(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    upper, right = values >> shift, values & mask
    for key in keys:
        upper, right = right, upper ^ (_mix_bits(right ^ key) & mask)
    return (upper << shift) | right


def _mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
