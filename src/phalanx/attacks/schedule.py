"""When an attacker lies: a seeded coin per step."""

import hashlib

from phalanx.pipeline import AttackConfig


def attacks_in(config: AttackConfig, voice: str, step: int) -> bool:
    """Whether the party, or the group, that is called `voice` lies in `step`."""
    if step < config.from_step or (config.until_step is not None and step >= config.until_step):
        return False
    text = f"phalanx attack {config.seed} {voice} {step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < config.rate * 2**64
