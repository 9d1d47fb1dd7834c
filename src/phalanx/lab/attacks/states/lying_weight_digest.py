"""Attest to one state and compute with another."""

import torch
from torch import Tensor

from phalanx.lab.attacks.attack import noise_seed
from phalanx.lab.attacks.states.twin import AlteredModuleAttack, AlteredWeights
from phalanx.models import StageModule
from phalanx.pipeline import StageCopy


class LyingWeightDigest(AlteredModuleAttack):
    """Every digest is that of the honest state; what runs are weights off by `strength` of their norm.

    No comparison of states can see it: both parties do have the state that they sign. Only the stage's outputs give it
    away.
    """

    def make_module(self, copy: StageCopy) -> StageModule:
        """The stage with other weights than it keeps."""
        return AlteredWeights(copy.module, lambda name, weight: weight + self._weight_offset(name, weight))

    def _weight_offset(self, name: str, weight: Tensor) -> Tensor:
        seed = noise_seed(self.config.seed, f"{self.seed_name} {name}", -1, 0)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype)
        size = self.strength * float(torch.linalg.vector_norm(weight) / torch.linalg.vector_norm(noise))
        return size * noise
