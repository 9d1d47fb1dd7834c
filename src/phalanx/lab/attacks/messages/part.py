"""Lie about a part of each message only, small enough to drown in a norm over the whole tensor."""

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class OneSequence(MessageAttack):
    """The sign of one sequence of the microbatch is flipped."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Negate one sequence, drawn for each message."""
        x = work.result.clone()
        x[int(torch.randint(x.shape[0], (), generator=generator))] *= -1
        return x


class OneToken(MessageAttack):
    """The sign of one token of the microbatch is flipped."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Negate one token, drawn for each message."""
        x = work.result.clone()
        sequence = int(torch.randint(x.shape[0], (), generator=generator))
        token = int(torch.randint(x.shape[1], (), generator=generator))
        x[sequence, token] *= -1
        return x
