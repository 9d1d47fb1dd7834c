"""Exchange two weight tensors of one shape: every number is a true one, in a wrong place."""

from collections.abc import Iterator
from itertools import combinations, islice

import torch
from torch import Tensor

from phalanx.lab.attacks.states.state_attack import StateAttack, UpdateInputs
from phalanx.pipeline import StageCopy


class LayerSwap(StateAttack):
    """Swaps all tensors of the stage's first two layers; in a stage of one layer, its first two of one shape."""

    @torch.no_grad()
    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Swap."""
        del update
        for first, other in self._weight_pairs(copy):
            saved = first.clone()
            first.copy_(other)
            other.copy_(saved)

    @staticmethod
    def _weight_pairs(copy: StageCopy) -> Iterator[tuple[Tensor, Tensor]]:
        layers = [dict(block.named_parameters()) for block in copy.module.own_blocks]
        if len(layers) >= 2:
            yield from ((weight, layers[1][name]) for name, weight in layers[0].items())
            return
        weights = [weight for layer in layers for weight in layer.values()]
        # equal ones, such as new norms, would be no lie
        pairs = (pair for pair in combinations(weights, 2) if pair[0].shape == pair[1].shape)
        yield from islice((pair for pair in pairs if not torch.equal(*pair)), 1)
