"""Push every token the same way, a little in each message."""

import torch
from torch import Tensor

from phalanx.lab.attacks.attack import noise_seed
from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack


class SlowDrift(MessageAttack):
    """`strength` is the size of the push relative to each token's norm; its direction never changes.

    Small pushes add up over steps where random ones would cancel out.
    """

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Add the push."""
        del generator
        sizes: Tensor = torch.linalg.vector_norm(work.result, dim=-1, keepdim=True)
        return work.result + self.strength * sizes * self._drift_direction(work)

    def _drift_direction(self, work: HonestMessage) -> Tensor:
        """A unit vector ``[dim]`` that depends on seed, party, stage and direction only."""
        seed = noise_seed(self.config.seed, f"{self.seed_name} {work.direction}", -1, work.stage)
        way = torch.randn(work.result.shape[-1], generator=torch.Generator().manual_seed(seed))
        return way / float(torch.linalg.vector_norm(way))
