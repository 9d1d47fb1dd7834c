"""The schedule of an attack: a seeded coin per step, and per attempt where the recovery is the paper's `restart`."""

import hashlib

from phalanx.pipeline import AttackConfig


def attacks_in(config: AttackConfig, voice: str, step: int, attempt: int = 0) -> bool:
    """Whether the party, or the group, that is called `voice` lies in this attempt at `step`."""
    if step < config.from_step or (config.until_step is not None and step >= config.until_step):
        return False
    text = f"phalanx attack {config.seed} {voice} {step}" + (f" {attempt}" if attempt else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < config.rate * 2**64
