"""The paper's attacker: in each attacked step one middle stage, drawn anew, falsifies all its messages of a direction.

Source: Lu et al. 2023, section 4.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.lab.attacks import HonestMessage, MessageAttack, make_attack
from phalanx.pipeline import AttackConfig, WrapCopy
from phalanx.pipeline.stage.stage_copy import leave_unwrapped
from phalanx.testing import Actor

Direction = Literal["forward", "backward"]

KINDS: Mapping[Direction, str] = MappingProxyType({"forward": "forward_sign_flip", "backward": "backward_gaussian"})
"""The paper's two attacks, by the direction of the falsified messages."""


@dataclass(frozen=True)
class LieSchedule:
    """A schedule of lies: which stage lies in which attempt at which step; the same for every arm of one seed."""

    direction: Direction
    rate: float
    stages: tuple[int, ...]
    seed: int

    def lying_stage(self, step: int, attempt: int = 0) -> int | None:
        """The stage that lies, None in an honest attempt."""
        coin, choice = (_draw_number(self.seed, purpose, step, attempt) for purpose in ("coin", "choice"))
        if not self.stages or coin >= self.rate * 2**64:
            return None
        return self.stages[choice % len(self.stages)]


@dataclass(frozen=True)
class FalsifiedMessage:
    """One message that was falsified; `party` is the number of the stage that the liar began with."""

    party: int
    step: int
    attempt: int
    microbatch: int


@dataclass
class Attacker:
    """An attacker that carries a schedule out and remembers its lies; no defence reads it.

    Attributes:
        plan: Schedule of lies; None without an attack.
        removed: Stages with a holder that was replaced by an honest one.
    """

    plan: LieSchedule | None
    attempt: int = 0
    removed: set[int] = field(default_factory=set)
    lies: list[FalsifiedMessage] = field(default_factory=list)

    def lying_stage_at(self, step: int, attempt: int | None = None) -> int | None:
        """Return the stage that lies in an attempt, by default in the one at hand; None in an honest attempt."""
        stage = None if self.plan is None else self.plan.lying_stage(step, self.attempt if attempt is None else attempt)
        return None if stage in self.removed else stage

    def wrapper_for(self, party: int) -> WrapCopy:
        """Return a wrapper that puts the attacker in the place of every copy that `party` holds."""
        return leave_unwrapped if self.plan is None else _ScheduledAttack(self, self.plan, party).wrap_copy

    def actor_for(self, party: int) -> Actor:
        """The same for a party of a real company."""
        if self.plan is None:
            return Actor()
        member = _ScheduledAttack(self, self.plan, party)
        return Actor(wrap_copy=member.wrap_copy)

    @property
    def attacked_steps(self) -> set[int]:
        """Steps in which anything was falsified."""
        return {lie.step for lie in self.lies}


class _ScheduledAttack(MessageAttack):
    """One of the project's attacks, which lies when the schedule that all parties share says so."""

    def __init__(self, attacker: Attacker, plan: LieSchedule, party: int) -> None:
        attack = make_attack(AttackConfig(kind=KINDS[plan.direction], seed=plan.seed), f"stage-{party}", None)
        if not isinstance(attack, MessageAttack):
            raise ConfigError(f"attack: {attack.config.kind!r} does not falsify messages; choose one that does")
        super().__init__(attack.config, attack.party, None)
        self._attack = attack
        self._attacker = attacker
        self._number = party

    def lies_in(self, step: int) -> bool:
        """Whether it is this party's turn."""
        return self._attacker.lying_stage_at(step, self._attacker.attempt) == self._number

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        return self._attack.lie(work, generator)

    def log_lie(
        self,
        stage: int,
        step: int,
        *,
        microbatch: int | None = None,
        direction: str | None = None,
        what: str | None = None,
    ) -> None:
        del stage, direction, what
        if microbatch is not None:
            self._attacker.lies.append(FalsifiedMessage(self._number, step, self._attacker.attempt, microbatch))


def _draw_number(seed: int, purpose: str, step: int, attempt: int) -> int:
    text = f"phalanx reproduce {seed} {purpose} {step} {attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
