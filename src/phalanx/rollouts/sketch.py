"""Commitments to hidden states: a few sums of all their entries with public random signs.

Unlike the largest entries of a state (TOPLOC), a sum depends on every entry. A worker that knows the signs still has to
have the state in order to have the sums.

Source: Achlioptas 2003 (random signs keep distances); Ong et al. 2025, arXiv 2501.16007 (commitments to activations).
"""

from functools import lru_cache

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from phalanx.rollouts.rollout import SKETCH_NUMBERS
from phalanx.security.crypto import in_domain

_DOMAIN = "rollout-sketch/1"


@lru_cache(maxsize=4)
def public_signs(width: int) -> Tensor:
    """Random signs, float32 ``[width, SKETCH_NUMBERS]``, scaled so that a sketch is about as long as the state."""
    size_bytes = -(-width * SKETCH_NUMBERS // 8)
    raw = blake3(in_domain(_DOMAIN, str(width).encode())).digest(size_bytes)
    bits = np.unpackbits(np.frombuffer(raw, np.uint8))[: width * SKETCH_NUMBERS]
    signs = torch.from_numpy(bits.astype(np.float32).reshape(width, SKETCH_NUMBERS))
    scaled: Tensor = (2 * signs - 1) / SKETCH_NUMBERS**0.5
    return scaled


def sketch_states(states: Tensor) -> NDArray[np.float32]:
    """Sketch hidden states ``[rows, width]``; float32 ``[rows, SKETCH_NUMBERS]``."""
    sketch = states.detach().float().cpu() @ public_signs(states.shape[-1])
    return np.asarray(sketch.numpy(), np.float32)


def sketch_distances(claimed: NDArray[np.float32], own: NDArray[np.float32]) -> NDArray[np.float64]:
    """Relative distance of each claimed sketch from the own one, ``[rows]``; infinity where it is no number."""
    wide = own.astype(np.float64)
    gap = np.linalg.norm(claimed.astype(np.float64) - wide, axis=-1)
    size = np.linalg.norm(wide, axis=-1)
    ratio = gap / np.maximum(size, np.finfo(np.float32).tiny)
    return np.where(np.isfinite(ratio), ratio, np.inf)
