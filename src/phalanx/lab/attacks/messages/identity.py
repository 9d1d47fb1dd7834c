"""Skip the stage: the input is sent on as the output."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class SkippedStage(MessageAttack):
    """No work for full pay; in a residual network the lie is well-shaped."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Pass the input on."""
        del generator
        return work.given.clone()
