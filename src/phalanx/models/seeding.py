"""First values that depend on a seed and a name, and on nothing else."""

import hashlib

import torch
from torch import Tensor

_SPREAD = 0.02
"""Standard deviation of a new head's weights, as transformers draws them."""


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU, seeded with the first 8 bytes of SHA-256 of ``seed|name``."""
    first_bytes = hashlib.sha256(f"{seed}|{name}".encode()).digest()[:8]
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(first_bytes, "big"))


def draw_score(name: str, weight: Tensor, seed: int) -> None:
    """Fill a new score head; the values depend on the seed and the name only."""
    values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    values.normal_(0.0, _SPREAD, generator=seeded_generator(seed, name))
    weight.detach().copy_(values)
