"""Noise that several parties compute alike: a function of a secret and of the one place where it is added.

Where a stage is audited, its auditor must compute its noise again, so that noise cannot come from the stage's own
generator. A party with a key can subtract the noise; without it, nobody can tell it from fresh noise.
"""

import hashlib
import hmac
import os
from collections.abc import Callable

from phalanx.config import canonical_json
from phalanx.security.crypto import in_domain
from phalanx.security.privacy.noise import SEED_BYTES, SecureStream


class NoiseSecret:
    """The secret of all noise of one session, drawn when it is made and kept in memory alone.

    Args:
        fresh: Draws random bytes; another one than the system's generator is for tests.

    Guarantees:
        No two epochs, stages, steps or tensors have the same noise, nor have two sessions. A key of one stage and epoch
        tells nothing about the keys of others.
    """

    def __init__(self, fresh: Callable[[int], bytes] = os.urandom) -> None:
        self._secret = fresh(SEED_BYTES)

    def key_of(self, epoch: int, stage: int) -> bytes:
        """Return the key of a stage's noise in all steps of an epoch."""
        return hmac.digest(self._secret, in_domain("privacy-noise-key/1", canonical_json([epoch, stage])), "sha256")


def noise_commitment(key: bytes) -> str:
    """Return what binds its owner to a key and tells nothing of it, in hex."""
    return hashlib.sha256(in_domain("privacy-noise-commitment/1", key)).hexdigest()


def noise_seed(key: bytes, step: int, name: str) -> bytes:
    """Return the seed of the noise on one tensor in one step; it tells nothing about any other tensor or step.

    Args:
        key: Key of the tensor's stage, in the epoch of the step.
    """
    return hmac.digest(key, in_domain("privacy-noise/1", canonical_json([step, name])), "sha256")


def noise_stream(key: bytes, step: int, name: str) -> SecureStream:
    """Return the randomness that follows from `noise_seed`."""
    return SecureStream(noise_seed(key, step, name))
