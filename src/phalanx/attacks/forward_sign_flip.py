"""Send the negated activation forward (Lu et al. 2023, section 4: forward attack)."""

import torch
from torch import Tensor

from phalanx.attacks.attacker import AttackedRunner


class ForwardSignFlip(AttackedRunner):
    """Norms stay as they were; only recomputation or channel means show it."""

    def lie(self, direction: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Negate activations, pass gradients on."""
        del generator
        return -tensor if direction == "forward" else tensor
