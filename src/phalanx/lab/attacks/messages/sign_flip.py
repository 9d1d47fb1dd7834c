"""Send the negated tensor (Lu et al. 2023, section 4: the forward attack)."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class SignFlip(MessageAttack):
    """Norms stay as they were; only recomputation, or channel means of activations, show it."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        return -work.result
