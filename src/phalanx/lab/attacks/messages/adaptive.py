"""Lie as far as the screen lets it: the attacker has the screen's own code, thresholds and averages."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack
from phalanx.pipeline import AttackConfig
from phalanx.pipeline.tolerance.screen import Screen


class Adaptive(MessageAttack):
    """Turns every token to the other side of its channel means; the norm and all channel means stay as they are.

    The receiver's screen sees nothing move at all, so a lie is never further than one standard deviation
    from its averages. To be sure, the attacker asks a screen of its own first, which has seen all that
    it has sent; where that one would object, it stays honest.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._screen = Screen()

    def falsify_message(self, work: HonestMessage) -> Tensor:
        """Lie, and let the attacker's own screen learn the sent message, as the receiver's does."""
        sent = super().falsify_message(work)
        self._screen.check_message(work.stage, work.direction, sent)
        return sent

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Mirror at the channel means."""
        del generator
        means = work.result.mean(dim=(0, 1), keepdim=True)
        mirrored = 2 * means - work.result
        # asked of a copy: a screen learns from what it lets pass
        objection = deepcopy(self._screen).check_message(work.stage, work.direction, mirrored)
        return mirrored if objection is None else work.result
