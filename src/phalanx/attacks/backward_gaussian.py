"""Send N(0, 1) noise backward instead of the gradient (Lu et al. 2023, section 4: backward attack)."""

import torch
from torch import Tensor

from phalanx.attacks.attacker import AttackedRunner


class BackwardGaussian(AttackedRunner):
    """Poisons every stage before the attacker; Adam's second moment keeps it for long."""

    def lie(self, direction: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Replace gradients, pass activations on."""
        if direction == "forward":
            return tensor
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
