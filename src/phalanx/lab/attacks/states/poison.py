"""Three ways to make a weight gradient up."""

import torch
from torch import Tensor

from phalanx.lab.attacks.states.gradient_attack import GradientAttack


class GradientSign(GradientAttack):
    """Uphill instead of downhill."""

    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Negate."""
        return {name: -gradient for name, gradient in gradients.items()}


class GradientScale(GradientAttack):
    """`strength` is the factor; AdamW forgets it after a while, the common clip norm does not."""

    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply."""
        return {name: self.strength * gradient for name, gradient in gradients.items()}


class GradientTopK(GradientAttack):
    """Flips the sign of the largest numbers only; `strength` is their share of each tensor."""

    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Negate the largest."""
        for gradient in gradients.values():
            flat = gradient.view(-1)
            count = min(max(1, round(self.strength * flat.numel())), flat.numel())
            largest = torch.topk(flat.abs(), count).indices
            flat[largest] = -flat[largest]
        return gradients
