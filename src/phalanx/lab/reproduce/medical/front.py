"""The frozen front, run once for every text: each arm and each epoch asks again for the same hidden states."""

import hashlib
import math

import torch
from torch import Tensor

from phalanx.lab.reproduce.medical.size import DELTA
from phalanx.split import Front
from phalanx.split.channel.tensor_kinds import WIRE_DTYPES


class RememberedFront:
    """A front that remembers every text.

    Args:
        front: Front in float32.
        wire: Precision of outputs, a key of `WIRE_DTYPES`; remembered values are float32.
    """

    def __init__(self, front: Front, wire: str = "fp32") -> None:
        self._front, self._dtype = front, WIRE_DTYPES[wire]
        self._known: dict[bytes, Tensor] = {}

    def with_wire(self, wire: str) -> "RememberedFront":
        """Return the same front and memory with another output precision."""
        other = RememberedFront(self._front, wire)
        other._known = self._known
        return other

    def __call__(self, ids: Tensor) -> Tensor:
        """Run it; the same text has the same bits, whatever texts it comes with."""
        keys = [key_of(row) for row in ids]
        for place, key in enumerate(keys):
            if key not in self._known:
                # alone: in a batch of another size the same text may be rounded otherwise
                self._known[key] = self._front(ids[place : place + 1])[0].clone()
        return torch.stack([self._known[key] for key in keys]).to(self._dtype)


class NoisyFront:
    """The front of a client with differential privacy and no enclave: it clips tokens and adds Gaussian noise.

    Each text is noised once and sent again as it is, so that there is one release to account for. A real client would
    take its noise from the operating system; this one's is drawn from the seed, to be repeatable.

    Args:
        front: Gives hidden states in float32.
        clip: Euclidean length to which each token's hidden states are clipped; decided without looking at the texts.
        noise: Standard deviation for each number, in units of `clip`.
        wire: Precision of outputs, as for `RememberedFront`.
    """

    def __init__(self, front: Front, clip: float, noise: float, seed: int, wire: str = "fp32") -> None:
        self._front, self._clip, self._noise, self._seed = front, clip, noise, seed
        self._dtype = WIRE_DTYPES[wire]

    def __call__(self, ids: Tensor) -> Tensor:
        """Run it, clip, add the noise."""
        states = self._front(ids)
        lengths = states.norm(dim=2, keepdim=True).clamp_min(self._clip)
        clipped = states * (self._clip / lengths)
        noise = torch.stack([self._noise_of(row, clipped.shape[1:]) for row in ids])
        noised: Tensor = clipped + self._noise * self._clip * noise
        return noised.to(self._dtype)

    def _noise_of(self, row: Tensor, shape: torch.Size) -> Tensor:
        first = hashlib.sha256(f"{self._seed}|".encode() + key_of(row)).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(first, "big") >> 1)
        return torch.randn(shape, generator=generator)


def typical_length(front: Front, ids: Tensor) -> float:
    """Median Euclidean length of a token's hidden states in public texts, ids ``[rows, tokens]``."""
    return float(front(ids).norm(dim=2).median())


def key_of(row: Tensor) -> bytes:
    """The ids of one text, as bytes."""
    return bytes(row.contiguous().numpy().tobytes())


def epsilon_of(noise: float, delta: float = DELTA) -> float:
    """Return the epsilon of one release of one token's hidden states, any two of which may be exchanged.

    Args:
        noise: Standard deviation in units of the clipping length; two clipped vectors are at most two lengths apart.

    Source: Balle and Wang 2018, theorem 8 (the exact condition for the Gaussian mechanism).
    """
    ratio = noise / 2.0
    low, high = 0.0, 600.0
    if _delta_of(high, ratio) > delta:
        return float("inf")
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta_of(middle, ratio) > delta else (low, middle)
    return high


def _delta_of(epsilon: float, ratio: float) -> float:
    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(0.5 / ratio - epsilon * ratio) - math.exp(epsilon) * below(-0.5 / ratio - epsilon * ratio)
