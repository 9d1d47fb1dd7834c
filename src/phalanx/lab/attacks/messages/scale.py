"""Send the tensor times a factor."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import MessageAttack, Work


class Scale(MessageAttack):
    """`strength` is the factor: 10 is seen by any statistics, 1.001 by none."""

    def lie(self, work: Work, generator: torch.Generator) -> Tensor:
        """Multiply."""
        del generator
        return self.strength * work.result
