"""Add noise that looks like the tensor itself, as the code beside Lu et al. 2023 did in its backward attack."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class GaussianAdded(MessageAttack):
    """Noise with the tensor's own mean and standard deviation; `strength` multiplies it."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Add."""
        x = work.result
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x + self.strength * (x.mean() + x.std() * noise)
