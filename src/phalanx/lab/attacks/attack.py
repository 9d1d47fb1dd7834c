"""The base of all attacks: one party in one run, when it lies, and the truth about it in its own log."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.pipeline import AttackConfig, StageCopy
from phalanx.testing import OutgoingMessage


def attack_files_in(config: AttackConfig, voice: str, step: int) -> bool:
    """Whether the party, or the group, that is called `voice` lies in `step`."""
    if step < config.from_step or (config.until_step is not None and step >= config.until_step):
        return False
    text = f"phalanx attack {config.seed} {voice} {step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < config.rate * 2**64


class Attack:
    """One party's lies in one run. The base is honest; subclasses override single actions.

    An attack enters a worker at two places, and nowhere else: `wrap` stands in for the copies of stages that
    the party holds or shadows, `rewrite` for what leaves its endpoint. A real worker and a simulated one
    use the same.

    Args:
        config: Configuration whose direction and strength are filled in by `make_attack`.
        log: File that receives one line per lie, so that a drill can compare lies with the guard's findings; no part of
            the guard reads it.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        self.config = config
        self.party = party
        self._log = log

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        """What is held (or shadowed) instead of an honest copy."""
        del held
        return copy

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        """Return the replacement of one message."""
        return (outgoing,)

    @property
    def seed_name(self) -> str:
        """The name under which coins are tossed and noise is drawn; parties with one voice lie alike."""
        return self.party

    @property
    def strength(self) -> float:
        """How large the lie is; each attack says in which measure."""
        if self.config.strength is None:
            raise ConfigError(f"attack.strength: {self.config.kind!r} has none; make attacks with make_attack")
        return self.config.strength

    def lies_in(self, step: int) -> bool:
        """Whether this party lies in `step`, in the attempt at hand."""
        return attack_files_in(self.config, self.seed_name, step)

    def lies_towards(self, direction: str) -> bool:
        """Whether messages of this direction are lies; True for every one where the config names none."""
        return self.config.direction in (None, "both", direction)

    def make_generator(self, step: int, microbatch: int) -> torch.Generator:
        """Randomness that depends on seed, voice and place only."""
        return torch.Generator().manual_seed(noise_seed(self.config.seed, self.seed_name, step, microbatch))

    def log_lie(
        self,
        stage: int,
        step: int,
        *,
        microbatch: int | None = None,
        direction: str | None = None,
        what: str | None = None,
    ) -> None:
        """Write one lie down; `what` names it where it is no tensor between stages."""
        if self._log is None:
            return
        record = {
            "party": self.party,
            "stage": stage,
            "step": step,
            "microbatch": microbatch,
            "direction": direction,
        } | ({} if what is None else {"what": what})
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def noise_seed(seed: int, voice: str, step: int, microbatch: int) -> int:
    """Seed of a replacement of one message; the same on every machine and Python."""
    text = f"phalanx attack noise {seed} {voice} {step} {microbatch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one message: NaN equals itself, and zero is not minus zero."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))
