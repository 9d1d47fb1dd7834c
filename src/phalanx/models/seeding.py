"""First values that depend on a seed and a name, and on nothing else."""

import hashlib

import torch


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU, seeded with the first 8 bytes of SHA-256 of ``seed|name``."""
    first_bytes = hashlib.sha256(f"{seed}|{name}".encode()).digest()[:8]
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(first_bytes, "big"))
