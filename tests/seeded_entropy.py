"""What stands in for the system's generator in tests of statistics, so that their outcome is no matter of luck."""

import random
from functools import partial

import numpy as np

from phalanx.security.privacy import discrete_gaussian, distributed


def bytes_from(seed):
    """Random bytes, reproducibly; in place of `os.urandom` and `secrets.token_bytes`."""
    return random.Random(seed).randbytes


def below_from(seed):
    """Uniform integers of any size, reproducibly; in place of `secrets.randbelow`."""
    generator = np.random.default_rng(seed)
    return lambda size: int.from_bytes(generator.bytes(24), "big") % size


def seed_noise(monkeypatch, seed):
    """Have all clients of noisy sums draw their shares, one after the other, of one seed."""
    monkeypatch.setattr(distributed, "discrete_gaussian", partial(discrete_gaussian, below=below_from(seed)))
