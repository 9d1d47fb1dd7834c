"""Send what takes no work at all, or what no computation can go on with."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class Zero(MessageAttack):
    """Zeros: the cheapest lie there is."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Replace."""
        del generator
        return torch.zeros_like(work.result)


class Constant(MessageAttack):
    """Every number is `strength`."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Replace."""
        del generator
        return torch.full_like(work.result, self.strength)


class NotANumber(MessageAttack):
    """One number of the tensor is NaN, which compares as equal to nothing and spreads to everything."""

    value = float("nan")

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Replace one number."""
        x = work.result.clone()
        place = int(torch.randint(x.numel(), (), generator=generator))
        x.view(-1)[place] = self.value
        return x


class Infinity(NotANumber):
    """One number of the tensor is infinite."""

    value = float("inf")
