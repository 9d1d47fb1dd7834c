"""Send an earlier true message again: right in every statistic, wrong for this microbatch."""

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack
from phalanx.pipeline import AttackConfig

_REMEMBERED = 64
"""Messages per stage and direction; more than two steps have."""


class StaleMicrobatch(MessageAttack):
    """The last microbatch's tensor; honest until there was one."""

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._past: dict[tuple[int, str], deque[HonestMessage]] = {}

    def falsify_message(self, work: HonestMessage) -> Tensor:
        """Lie, then remember the truth for later lies."""
        sent = super().falsify_message(work)
        self._past.setdefault((work.stage, work.direction), deque(maxlen=_REMEMBERED)).append(work)
        return sent

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Repeat one of the messages of before that this attack repeats; the truth where there is none."""
        past = [old for old in self._past.get((work.stage, work.direction), ()) if self.can_replace(old, work)]
        return self.choose_message(past, generator).result if past else work.result

    def can_replace(self, old: HonestMessage, new: HonestMessage) -> bool:
        """Whether `old` may be sent instead of `new`."""
        return (old.step, old.microbatch) != (new.step, new.microbatch)

    def choose_message(self, past: list[HonestMessage], generator: torch.Generator) -> HonestMessage:
        """Which of several."""
        del generator
        return past[-1]


class StaleStep(StaleMicrobatch):
    """An attack that sends the same microbatch's tensor of the last step."""

    def can_replace(self, old: HonestMessage, new: HonestMessage) -> bool:
        return (old.step, old.microbatch) == (new.step - 1, new.microbatch)


class ReplayedMessage(StaleMicrobatch):
    """Another sample's tensor of an earlier step, drawn for each message."""

    def can_replace(self, old: HonestMessage, new: HonestMessage) -> bool:
        """Another place, any earlier step that is remembered."""
        return old.step < new.step and old.microbatch != new.microbatch

    def choose_message(self, past: list[HonestMessage], generator: torch.Generator) -> HonestMessage:
        return past[int(torch.randint(len(past), (), generator=generator))]
