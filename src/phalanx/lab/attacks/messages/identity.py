"""Skip the stage: what came in goes out."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import MessageAttack, Work


class Identity(MessageAttack):
    """No work for full pay; in a residual network the lie is well-shaped."""

    def lie(self, work: Work, generator: torch.Generator) -> Tensor:
        """Pass the input on."""
        del generator
        return work.given.clone()
