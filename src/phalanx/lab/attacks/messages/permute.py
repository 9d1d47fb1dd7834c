"""Send true numbers in wrong places: every statistic over the message is unchanged."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class PermutedSequences(MessageAttack):
    """Each sequence gets another one's tensor; nothing changes where a microbatch has one sequence."""

    dim = 0

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Shift all by a number of places, drawn for each message, so that none keeps its own."""
        size = work.result.shape[self.dim]
        if size < 2:
            return work.result
        places = 1 + int(torch.randint(size - 1, (), generator=generator))
        return torch.roll(work.result, places, self.dim)


class PermutedTokens(PermutedSequences):
    """Each token gets another one's tensor, within its sequence."""

    dim = 1
