"""Move the weights a little further than the verified gradient does, the same way in every step."""

import torch
from torch import Tensor

from phalanx.lab.attacks.attack import noise_seed
from phalanx.lab.attacks.states.state_attack import StateAttack, UpdateInputs
from phalanx.pipeline import StageCopy


class WeightDrift(StateAttack):
    """`strength` is the size of each step's push relative to the norm of each weight tensor."""

    @torch.no_grad()
    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Push every weight."""
        del update
        for name, weight in copy.optimizer.state_tensors().items():
            if name.startswith("weight/"):
                way = self._drift_direction(name, weight)
                weight.add_(way, alpha=self.strength * float(weight.norm()))

    def _drift_direction(self, name: str, weight: Tensor) -> Tensor:
        """A tensor of norm 1 that depends on seed, party and name only."""
        generator = torch.Generator().manual_seed(noise_seed(self.config.seed, f"{self.seed_name} {name}", -1, 0))
        way = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        return (way / float(torch.linalg.vector_norm(way))).to(weight.device)
