"""Send the tensor times a factor."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class ScaledMessage(MessageAttack):
    """`strength` is the factor: 10 is seen by any statistics, 1.001 by none."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Multiply."""
        del generator
        return self.strength * work.result
