"""Send noise instead of the tensor (Lu et al. 2023, section 4: the backward attack)."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class Gaussian(MessageAttack):
    """N(0, 1) that owes nothing to the truth; as a gradient, Adam's second moment keeps it for long."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Replace."""
        return torch.randn(work.result.shape, generator=generator, dtype=work.result.dtype)
